"""The tokenizer and the base model that a run starts from, copied into the store.

With the copies a run depends on nothing outside of the store.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.config.model import ModelConfig
from rlpipe.config.pipeline import RUN, SET_TEACHER, PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.data.sources import PromptSets
from rlpipe.data.tokenizer_files import TOKENIZER_FILES
from rlpipe.loop.session import Session
from rlpipe.loop.stage import Attempt, Produced, stage
from rlpipe.models.folder import weight_files
from rlpipe.records.messages import content_text
from rlpipe.stages.model_source import (
    MODEL_FILES,
    forget_copies,
    model_files,
    newest_policy,
    source_of,
    write_trained_template,
)
from rlpipe.stages.training import new_adapter, save_loaded
from rlpipe.store.artifacts import write_bytes, write_file
from rlpipe.store.backend import Store
from rlpipe.store.local_copy import materialise
from rlpipe.store.policy_files import stored_policy
from rlpipe.store.run import Run
from rlpipe.trainer.jobs import LoadJob, NewModel

TOKENIZER_TEXTS_MAX = 2000


@stage("base", "tokenizer", verb="prepare_tokenizer")
def base_tokenizer(session: Session, attempt: Attempt) -> Produced:
    """The tokenizer of the run: the model's own, or one built from the prompts."""
    with tempfile.TemporaryDirectory() as scratch:
        source = tokenizer_folder(session.config, session.data.prompts, Path(scratch))
        own = Path(scratch) / "own"
        own.mkdir()
        for path in [source / name for name in TOKENIZER_FILES if (source / name).is_file()]:
            shutil.copyfile(path, own / path.name)
        write_trained_template(session.config.model, own)
        return Produced(_copied(attempt, own.iterdir()))


def _copied(attempt: Attempt, paths: Iterable[Path]) -> list[FileRecord]:
    files = sorted(path for path in paths if path.is_file())
    assert files, "a model's folder was empty, which preflight refuses"
    return [write_file(attempt.store, attempt.folder, attempt.name, path.name, path) for path in files]


def tokenizer_folder(config: PipelineConfig, prompts: PromptSets, scratch: Path) -> Path:
    """The folder with the tokenizer of a new run: the model's folder, or `scratch`.

    In `scratch` a tokenizer is built from the prompts.
    """
    if config.model.path:
        return source_of(config).folder
    uses = ("rl", "evaluation") if config.sets("rl") else ("evaluation",)
    texts = [prompt for use in uses for rows in prompts(use) for prompt in rows[:TOKENIZER_TEXTS_MAX]]
    build_tokenizer([content_text(message) for prompt in texts for message in prompt.messages], scratch)
    return scratch


@stage("base", "policy", verb="prepare_model")
async def base_policy(session: Session, attempt: Attempt, *, tokenizer: ArtifactRef) -> Produced:
    """The base model: copied from `model.path`, or new from the seed (made by the trainer).

    If it is the policy of another run, the manifest names that run.
    """
    model = session.config.model
    if model.path:
        source = await asyncio.to_thread(source_of, session.config)
        own = await asyncio.to_thread(materialise, session.run.store, tokenizer, session.data.folder / "tokenizer")
        named = [source.folder / name for name in MODEL_FILES] + [own / name for name in TOKENIZER_FILES]
        files = await asyncio.to_thread(_copied, attempt, named + weight_files(source.folder))
        if source.policy:
            await asyncio.to_thread(forget_copies, session.config)
        return Produced(files, {"source": source.policy} if source.policy else {}, weight_version=0)
    new = _new_model(model, await asyncio.to_thread(lambda: session.data.tokenizer), session.config.seed)
    load = LoadJob(f"{attempt.folder}/new", new, policy=None, state=None)
    return (await save_loaded(session, load, attempt)).produced({}, weight_version=0)


@stage("base", "probe", verb="prepare_probe")
async def base_probe(session: Session, attempt: Attempt, *, policy: ArtifactRef) -> Produced:
    """The probe of a base model that was copied, and so was not saved by the trainer."""
    load = LoadJob(f"{policy.folder}/fresh", None, policy=policy, state=None, adapter=new_adapter(session.config))
    return (await save_loaded(session, load, attempt, policy=False)).produced({}, weight_version=None)


@stage("base", "reference", verb="prepare_reference")
def base_reference(session: Session, attempt: Attempt, *, tokenizer: ArtifactRef) -> Produced:
    """A copy of the reference of the KL term, where `rl.reference` names one."""
    return _frozen(session, attempt, "reference", tokenizer)


@stage("base", "teacher", verb="prepare_teacher")
def base_teacher(session: Session, attempt: Attempt, *, tokenizer: ArtifactRef) -> Produced:
    """A copy of the teacher that `rl.teacher` names."""
    return _frozen(session, attempt, "teacher", tokenizer)


@stage("base", f"{SET_TEACHER}{{tag}}", verb="prepare_set_teacher")
def base_set_teacher(session: Session, attempt: Attempt, *, tag: str, tokenizer: ArtifactRef) -> Produced:
    """A copy of a teacher that data sets name in place of `rl.teacher`. `tag`: the hash of its
    name.
    """
    return _frozen(session, attempt, f"{SET_TEACHER}{tag}", tokenizer)


def _frozen(session: Session, attempt: Attempt, stage: str, tokenizer: ArtifactRef) -> Produced:
    """A copy of the model that a field names: a later start uses the same one, even if its source
    has changed. `stage`: of `PipelineConfig.frozen_models`.
    """
    field, name = session.config.frozen_models[stage]
    if stage == "teacher" and session.config.rl.teacher_engine:
        other = _teacher_tokenizer(session.config)
        check_vocabulary(f"{field}={name!r}", _committed_tokenizer(session.run.store, tokenizer), other)
        return Produced(
            [write_bytes(attempt.store, attempt.folder, attempt.name, "tokenizer.json", other)],
            {"source": session.config.rl.teacher_engine},
        )
    source = source_of(session.config, field, name)
    other = (source.folder / "tokenizer.json").read_bytes()
    check_vocabulary(f"{field}={name!r}", _committed_tokenizer(session.run.store, tokenizer), other)
    files = _copied(attempt, model_files(source.folder))
    forget_copies(session.config)
    return Produced(files, {"source": source.policy or source.place})


def _teacher_tokenizer(config: PipelineConfig) -> bytes:
    """The tokenizer.json of a teacher on an engine, of whose folder nothing else is needed."""
    path = Path(config.rl.teacher).expanduser() / "tokenizer.json"
    if not path.is_file():
        path = source_of(config, "rl.teacher", config.rl.teacher).folder / "tokenizer.json"
    return path.read_bytes()


def check_frozen(config: PipelineConfig, stage: str, run: Run | None, prompts: PromptSets, scratch: Path) -> None:
    """UserError unless the reference, or a teacher, has the vocabulary of the run's tokenizer, or
    of the tokenizer that a new run would get.
    """
    field, name = config.frozen_models[stage]
    if run is not None and name.startswith(RUN):
        policy = newest_policy(run.store, field, name)[0]
        other = _committed_tokenizer(run.store, policy)
    elif stage == "teacher" and config.rl.teacher_engine:
        other = _teacher_tokenizer(config)
    else:
        other = (source_of(config, field, name).folder / "tokenizer.json").read_bytes()
    committed = run.artifact("base", 0, "tokenizer") if run is not None else None
    if run is not None and committed is not None:
        own = _committed_tokenizer(run.store, committed[0])
    else:
        own = (tokenizer_folder(config, prompts, scratch) / "tokenizer.json").read_bytes()
    check_vocabulary(f"{field}={name!r}", own, other)


def _committed_tokenizer(store: Store, ref: ArtifactRef) -> bytes:
    return stored_policy(store, ref).read("tokenizer.json")


def check_vocabulary(named: str, own: bytes, other: bytes) -> None:
    """UserError, which begins with `named`, the field and its value, unless both tokenizer.json map
    each token to the same number: a frozen model scores the policy's tokens.
    """
    policy, frozen = (_vocabulary(named, document) for document in (own, other))
    differ = sorted({token for token, _ in policy.items() ^ frozen.items()})
    if differ:
        raise UserError(
            f"{named}: its vocabulary differs in {len(differ):,} tokens, for example {differ[0]!r}; use a model with"
            " the tokenizer of this run's"
        )


def _vocabulary(named: str, tokenizer: bytes) -> dict[str, int]:
    try:
        tree = json.loads(tokenizer)
        tokens = tree["model"]["vocab"]
        numbered = tokens if isinstance(tokens, dict) else {entry[0]: number for number, entry in enumerate(tokens)}
        return numbered | {entry["content"]: entry["id"] for entry in tree["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{named}: a tokenizer.json cannot be compared ({error!r:.100})") from error


def _new_model(model: ModelConfig, tokenizer: ChatTokenizer, seed: int) -> NewModel:
    """A new Qwen3 of the given shape."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return NewModel({**new_config(model, tokenizer.vocab_size), **ends}, seed)


def new_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json of a Qwen3 of the given shape."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "initializer_range": model.init_std,
        "tie_word_embeddings": True,
        "max_position_embeddings": model.context_tokens_max,
    }
