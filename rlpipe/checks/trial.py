"""A model's config and its tensors' names, shapes and values, tried without the model in memory
(`python -m rlpipe.checks.trial`) before a run depends on them.

First line in: {"where", "folder" or "config", "context_tokens_max", "context_ranks", "adapter"
where one is trained}; out: the fields of a TriedModel or {"error"}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.checks.tried_model import TriedModel
from rlpipe.models.adapter import is_adapter, put_adapter
from rlpipe.models.causal import empty_model, hf_config
from rlpipe.models.checkpoint import check_weights
from rlpipe.models.context_parallel import check_context_group
from rlpipe.models.folder import check_generation_config, folder_config
from rlpipe.models.small import small_config, small_model
from rlpipe.processes.user_code import CodeRaised, Loaded, cause_of, serve, user_code
from rlpipe.store.adapter_files import ADAPTER
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.selftest import prove

TOKENS = 8  # of the forward pass on shapes only
# the errors of a family's code that needs values, on tensors that are shapes only
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class ModelTrial(TypedDict):
    """The first request: a model, by `folder` or `config`."""

    where: str
    folder: NotRequired[str]
    config: NotRequired[dict[str, Any]]
    context_tokens_max: int
    context_ranks: NotRequired[int]
    adapter: NotRequired[dict[str, Any]]


def try_model(hello: ModelTrial) -> JsonDict:
    """The answer of the process, the fields of a TriedModel. UserError when the config makes no
    model, its parts do not fit, it has too few positions, or its weights are those of another
    model.
    """
    folder, context_tokens_max = Path(hello.get("folder", "")), hello["context_tokens_max"]
    config = config_of(hello)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < context_tokens_max:
        raise UserError(
            f"it has max_position_embeddings={positions}, which is less than"
            f" model.context_tokens_max={context_tokens_max}; lower model.context_tokens_max"
        )
    check_context_group(config, hello.get("context_ranks", 1))
    lm = empty_model(config)
    _try_shapes(config)
    if "folder" in hello:
        check_generation_config(folder)
        check_weights(folder, lm)
    num_parameters, num_adapted = sum(parameter.numel() for parameter in lm.parameters()), 0
    if "adapter" in hello:
        put_adapter(lm, ADAPTER.validate_python(hello["adapter"]))
        num_adapted = sum(parameter.numel() for name, parameter in lm.named_parameters() if is_adapter(name))
    return asdict(TriedModel(num_parameters, num_adapted, rows_of(config)))


def config_of(hello: ModelTrial) -> PretrainedConfig:
    """The config that is tried."""
    return hf_config(hello.get("config") or folder_config(Path(hello.get("folder", ""))))


def _try_shapes(config: PretrainedConfig) -> None:
    """A forward pass on shapes only.

    An error is the config's fault, unless the family's code needs values.
    """
    try:
        with FakeTensorMode(), torch.inference_mode():
            # bfloat16: the experts' product of other numbers has no shapes-only form
            lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            row = torch.zeros((1, TOKENS), dtype=torch.long)
            PolicyModel(lm).eval()(row, row, row[0], row[0], 1.0)
    except NEEDS_VALUES:
        return


def rows_of(config: PretrainedConfig) -> str:
    """Says how the trainer will put sequences into rows, tried on a small model of the family;
    UserError when the trainer cannot train it.
    """
    try:
        with user_code():  # a family's numbers go together in its own way
            proof = prove(PolicyModel(small_model(small_config(config))), torch.device("cpu"))
            assert proof.is_finite, "small numbers that do not go together"
    except CodeRaised as error:  # its weights are tried when they are loaded
        return f"not tried ({error.__cause__!r:.80})"
    return "packed" if proof.rows(config.model_type, "float32") >= Rows.PACKED else "one sequence a row"


def load(hello: Any, trial: Callable[[Any], JsonDict] = try_model) -> Loaded:
    """Tries the model by `trial`; returns the answer of the process, and the function for its
    requests. UserError when the model is refused.
    """
    try:
        with user_code():
            answer = trial(hello)
    except CodeRaised as error:
        raise UserError(f"{hello['where']}: {cause_of(error, 'config.json makes no model that runs')}") from error
    return answer, lambda request: request


if __name__ == "__main__":
    serve(load)
