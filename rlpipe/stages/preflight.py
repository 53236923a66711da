"""Everything that can be known to be wrong is said before anything is written, and before a model is loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rlpipe.config import PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.conversations import split_validation
from rlpipe.data.sources import load_conversations, load_prompts
from rlpipe.data.tiny_tokenizer import build_tokenizer
from rlpipe.environments.process import check_environment
from rlpipe.filters import resolve_filters
from rlpipe.launch import check_port_free
from rlpipe.rewards.pool import check_rewards
from rlpipe.stages.base import model_folder
from rlpipe.stages.importing import IMPORTED
from rlpipe.stages.rollout_source import open_source
from rlpipe.stages.sampling import check_carried
from rlpipe.stages.session import data_seed
from rlpipe.store.backend import check_access, open_store
from rlpipe.store.lease import check_free
from rlpipe.store.run import Run, find_run
from rlpipe.types import UserError


def preflight(config: PipelineConfig, fork: Run | None = None) -> None:
    """UserError naming field, file or row, and the fix, when the run could not succeed.

    `fork`: the run that is about to be forked (`planned_fork`). A redo needs nothing but the store.
    """
    redo = fork is not None and bool(fork.redo)
    if config.trainer.nodes > 1:
        raise UserError("trainer.nodes: `rlpipe run` starts a gang on one node; plan accepts more, run does not yet")
    _check_ports(config)
    if config.model.path:
        model_folder(config.model)
    if config.rl.num_iterations:
        check_rewards(config.rl.rewards, config.rl.reward_args)
        resolve_filters(config.rl.filters)
        if config.rl.environment:
            _check_environment(config)
    if not redo:
        _check_data(config)
    store = open_store(config.store)
    check_access(store)
    if fork is not None:
        check_carried(fork)
    found = fork or (find_run(store, config) if config.run else None)
    if found is not None:
        check_free(store, found.root)
    run, last = found or Run(store, config), config.rl.num_iterations - 1
    if config.rl.rollouts_from and not redo and last >= 0 and run.artifact("rl", last, IMPORTED) is None:
        prompts = [prompt for data in config.sets("rl") for prompt in load_prompts(data, data_seed(config.seed, data.name))]
        open_source(config, store, prompts)


def _check_data(config: PipelineConfig) -> None:
    for data in config.data:
        if data.use != "sft":
            load_prompts(data, config.seed)
    conversations = {data.name: load_conversations(data, data_seed(config.seed, data.name)) for data in config.sets("sft")}
    split_validation(conversations, config.sft.validation_fraction if config.sft.validated else 0.0)


def _check_environment(config: PipelineConfig) -> None:
    """The environment loads, and the chat template can put its messages."""
    rl, model = config.rl, config.model
    roles = check_environment(rl.environment, rl.environment_args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(model) if model.path else Path(scratch)
        if not model.path:
            build_tokenizer(["any text: the template is the same"], folder)
        tokenizer = ChatTokenizer.from_folder(folder, model.chat_template, model.chat_template_args)
    for role in roles:
        tokenizer.encode_continuation([{"role": role, "content": "an answer"}])


def _check_ports(config: PipelineConfig) -> None:
    ports = [("trainer.port", config.trainer.port)] if config.trainer.port else []
    if config.engines.port:
        ports += [("engines.port", config.engines.port + index) for index in range(config.engines.count)]
    for field, port in ports:
        try:
            check_port_free(field, port)
        except ValueError as error:
            raise UserError(str(error)) from error
