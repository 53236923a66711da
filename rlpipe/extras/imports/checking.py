"""The check of `rl.rollouts_from` before a run starts."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path

from rlpipe.base.seeds import data_seed
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.data.sources import load_prompts
from rlpipe.data.tokenizer_files import read_tokenizer
from rlpipe.extras.imports.importing import (
    IMPORTED,
    check_enough,
    check_groups,
    check_tokenizer,
    foreign_files,
    imported_at,
    is_run,
    source_run,
)
from rlpipe.models.folder import folder_config
from rlpipe.records.prompt import Prompt
from rlpipe.stages.base import tokenizer_folder
from rlpipe.stages.model_source import source_of
from rlpipe.store.artifacts import file_sha256
from rlpipe.store.local_copy import materialise
from rlpipe.store.run import Run


def check_source(run: Run) -> None:
    """Checks that enough rollouts are stored for a run with iterations, and that their tokens are
    those of the run's tokenizer: its own if it has one, else the one that it would get. Nothing is
    read once the last iteration has its rollouts.
    """
    if run.artifact("rl", run.config.rl.num_iterations - 1, IMPORTED) is not None:
        return
    config, prompts = run.config, cache(partial(load_sets, run.config))
    source = source_run(run) if is_run(config.rl.rollouts_from) else None
    imported = run.artifact("rl", imported_at(run), "imported") if source is None else None
    if imported is not None:
        check_enough(run, imported[1].metrics["num_groups"])
        return  # imported already
    committed = run.artifact("base", 0, "tokenizer")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if committed is not None:
            folder = materialise(run.store, committed[0], scratch)
        else:
            folder = tokenizer_folder(config, prompts, scratch)
        vocab_size = read_tokenizer(folder)[0].get_vocab_size(with_added_tokens=True)
        sha256 = file_sha256(folder / "tokenizer.json")
    if source is not None:
        check_tokenizer(source, sha256)
        return
    model = folder_config(source_of(config).folder) if config.model.path else {}
    files = foreign_files(run, prompts, max(vocab_size, model.get("vocab_size", 0)))
    check_groups(run, [len(group) for _, group in files.groups()])


def load_sets(config: PipelineConfig, use: str) -> list[list[Prompt]]:
    """Loads the prompt sets of one use, each with its own seed."""
    return [load_prompts(data, data_seed(config.seed, data.name)) for data in config.sets(use)]
