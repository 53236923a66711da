"""Everything that can be known to be wrong is said before anything is written, and before a model is loaded."""

from __future__ import annotations

from rlpipe.config import PipelineConfig
from rlpipe.data.sources import check_source
from rlpipe.filters import resolve_filters
from rlpipe.launch import check_port_free
from rlpipe.rewards.pool import check_rewards
from rlpipe.stages.base import model_folder
from rlpipe.store.backend import check_access, open_store
from rlpipe.types import UserError


def preflight(config: PipelineConfig) -> None:
    """UserError naming field, file or row, and the fix, when the run could not succeed."""
    try:
        for field, port in (("engines.port", config.engines.port), ("trainer.port", config.trainer.port)):
            if port:
                check_port_free(field, port)
    except ValueError as error:
        raise UserError(str(error)) from error
    if config.model.path:
        model_folder(config.model)
    if config.rl.num_iterations:
        check_rewards(list(config.rl.rewards))
        resolve_filters(config.rl.filters)
    for data in config.data:
        check_source(data, config.seed)
    check_access(open_store(config.store))
