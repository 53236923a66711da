"""Everything that can be known to be wrong is said before anything is written, and before a model is loaded."""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from pathlib import Path

from rlpipe.config import PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.conversations import split_validation
from rlpipe.data.sources import load_conversations, load_prompts
from rlpipe.data.tiny_tokenizer import build_tokenizer
from rlpipe.environments.pool import check_environment
from rlpipe.filters import resolve_filters
from rlpipe.launch import check_port_free
from rlpipe.rewards.pool import check_rewards
from rlpipe.stages.base import model_folder, tokenizer_folder
from rlpipe.stages.importing import IMPORTED
from rlpipe.stages.rollout_source import open_source
from rlpipe.stages.sampling import check_carried
from rlpipe.stages.session import data_seed, load_sets
from rlpipe.store.artifacts import file_sha256, materialise
from rlpipe.store.backend import check_access, open_store
from rlpipe.store.lease import check_free
from rlpipe.store.run import Run, find_run


def preflight(config: PipelineConfig, fork: Run | None = None) -> None:
    """UserError naming field, file or row, and the fix, when the run could not succeed.

    `fork`: the run that is about to be forked (`planned_fork`). A redo needs nothing but the store.
    """
    redo = fork is not None and bool(fork.redo)
    _check_ports(config)
    if config.model.path:
        model_folder(config.model)
    if config.rl.num_iterations:
        check_rewards(config.rl.rewards, config.rl.reward_args, config.rl.reward_timeout_s)
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
        _check_source(run)


def _check_data(config: PipelineConfig) -> None:
    for data in config.data:
        if data.use != "sft":
            load_prompts(data, config.seed)
    conversations = {data.name: load_conversations(data, data_seed(config.seed, data.name)) for data in config.sets("sft")}
    split_validation(conversations, config.sft.validation_fraction if config.sft.validated else 0.0)


def _check_source(run: Run) -> None:
    """What is stored is enough, and its tokens are those of the run's tokenizer: its own if it has one, else what it would be."""
    config, prompts = run.config, cache(partial(load_sets, run.config))
    source = open_source(run, [prompt for rows in prompts("rl") for prompt in rows])
    committed = run.artifact("base", 0, "tokenizer")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if committed is not None:
            folder = materialise(run.store, committed[0], scratch)
        else:
            folder = tokenizer_folder(config, prompts, scratch)
        tokenizer = ChatTokenizer.from_folder(folder, config.model.chat_template, config.model.chat_template_args)
        sha256 = file_sha256(folder / "tokenizer.json")
    model = json.loads((model_folder(config.model) / "config.json").read_text()) if config.model.path else {}
    source.check(sha256, max(tokenizer.vocab_size, model.get("vocab_size", 0)))


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
    trainer, engines = config.trainer, config.engines
    ports = [("trainer.port", trainer.port)] if trainer.port and trainer.place == "process" else []
    if engines.port and engines.place == "process":
        ports += [("engines.port", engines.port + index) for index in range(engines.count)]
    for field, port in ports:
        check_port_free(field, port)
