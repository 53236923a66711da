"""What everything starts from: the tokenizer and the base model, copied into the store so that a run is whole by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlpipe.config.model import ModelConfig
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.data.template_text import write_template
from rlpipe.data.tokenizer_files import TOKENIZER_FILES
from rlpipe.models.folder import INDEX, tensor_shapes, weight_files
from rlpipe.models.whole import base_of, whole_policy
from rlpipe.processes.pool import Child, ChildPool
from rlpipe.records.messages import content_text
from rlpipe.report.plan import ModelSizes
from rlpipe.report.plan_cost import Speed, places
from rlpipe.stages.session import PromptSets, Session
from rlpipe.stages.stage import Attempt, Produced, stage
from rlpipe.stages.training import new_adapter, save_loaded
from rlpipe.store.artifacts import PRUNED, write_file
from rlpipe.store.backend import Store
from rlpipe.store.deltas import DELTA
from rlpipe.store.local_copy import materialise, read_small_file
from rlpipe.store.run import Run, open_existing
from rlpipe.trainer.jobs import LoadJob, NewModel
from rlpipe.types import ArtifactRef, FileRecord, StoreError, UserError

IMPORT_GGUF = ".venv/bin/python scripts/import_gguf.py"
MODEL_FILES = {"config.json", "generation_config.json", INDEX}
TOKENIZER_TEXTS_MAX = 2000
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_COPIES = ["*/*", "consolidated*"]  # of the same weights, for other programs
HUB_TIMEOUT_S = 10.0
RUN = "run:"  # begins an `rl.reference` that is the policy of a run
TRIAL_TIMEOUT_S = 120.0  # of a model's config, most of it to import torch


def model_folder(model: ModelConfig, field: str = "model.path") -> Path:
    """The local folder of `model.path`; UserError, which names the field that it is from, when it is no model in HF format."""
    folder = Path(model.path).expanduser()
    if folder.suffix == ".gguf":
        raise UserError(f"{field}={model.path!r} is a GGUF file: make a folder of it with `{IMPORT_GGUF} {model.path} FOLDER`")
    if (folder.parent / PRUNED).is_file():
        raise UserError(
            f"{field}={model.path!r} was pruned: make it again with `rlpipe export RUN --version K --to DIR`, and name DIR"
        )
    if not folder.is_dir():
        if model.path.startswith(("/", "~", ".")):  # no name of the hub
            hint = f"`make smollm2` makes the one of preset smollm2, `{IMPORT_GGUF} FILE FOLDER` one of any GGUF file"
            raise UserError(f"{field}={model.path!r}: there is no such folder; {hint}")
        folder = _snapshot(model.path, field)
    if (folder / DELTA).is_file():
        raise UserError(
            f"{field}={model.path!r} is stored as a difference to another policy: `rlpipe export` makes a model folder of it"
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if missing or not any(folder.glob("*.safetensors")):
        wanted = ", ".join(missing or ["*.safetensors"])
        raise UserError(f"{field}={model.path!r} is no model in HF format: {wanted} is missing; empty builds a new model")
    try:
        tensor_shapes(folder)
    except StoreError as error:
        raise UserError(f"{field}={model.path!r}: {error}") from error
    return folder


@contextlib.contextmanager
def _from_hub(name: str, field: str) -> Iterator[None]:
    """UserError for what goes wrong with the model of that name."""
    # HTTPError is that of the HTTP client below, which changes with the hub's version; the other two are about its proxy
    from huggingface_hub.errors import HFValidationError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        yield
    except (OSError, HFValidationError, HTTPError, ImportError, ValueError) as error:
        raise UserError(
            f"{field}={name!r} is neither a folder nor a model of the hub that can be reached from here ({error})"
        ) from error


def _snapshot(name: str, field: str, local_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    with _from_hub(name, field):
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES, local_files_only=local_only))


def place_of_model(model: ModelConfig, field: str = "model.path") -> tuple[str, Path]:
    """Where the model is, for a plan, and a folder that has its config.json, which is all of it that is downloaded."""
    if Path(model.path).expanduser().exists() or model.path.startswith(("/", "~", ".")):
        folder = model_folder(model, field)
        return str(folder), folder
    with contextlib.suppress(UserError):
        folder = _snapshot(model.path, field, local_only=True)
        if any(folder.glob("*.safetensors")):  # a plan before may have left the config there
            return f"{model.path} in {folder}", folder
    from huggingface_hub import hf_hub_download

    with _from_hub(model.path, field):
        config = Path(hf_hub_download(model.path, "config.json", etag_timeout=HUB_TIMEOUT_S))
    return f"{model.path} of the hub; the run downloads it", config.parent


@dataclass(frozen=True)
class TriedModel:
    """What is known of a model whose config and shapes were tried. `rows`: how sequences are put into rows."""

    num_parameters: int
    rows: str
    sizes: ModelSizes | None
    speed: Speed | None = None


def try_model(config: PipelineConfig, named: Mapping[str, object], *, sized: bool) -> TriedModel:
    """Tries a model in a process of its own: `where` it is from, and its `folder` or its `config`; `sized`: with what a plan counts."""
    trainer, shared = config.trainer, {"context_ranks": config.trainer.context_ranks}
    hello = {**named, "context_tokens_max": config.model.context_tokens_max, **shared}
    if sized:
        training = {"tokens_max": trainer.tokens_max, "activation_checkpointing": trainer.activation_checkpointing}
        hello["training"] = training | {"dtype": config.model.dtype} | shared
        if not (trainer.gpu_ids or config.engines.gpu_ids):
            engine = {"places": places(config), "engine_threads": config.engines.threads}
            hello["timed"] = {"tokens_max": trainer.tokens_max, "threads": trainer.threads, **engine}
    field = str(named["where"])
    with closing(ChildPool(field, "rlpipe.trainer.trial", hello, start_timeout_s=TRIAL_TIMEOUT_S)) as trial:
        (ready,) = trial.on_all(Child.start)
    assert ready["num_parameters"] > 0, "a model without parameters"
    sizes = ModelSizes(**ready["sizes"]) if ready["sizes"] else None
    speed = Speed(**ready["speed"]) if ready["speed"] else None
    return TriedModel(ready["num_parameters"], ready["rows"], sizes, speed)


def tried_adapter(config: PipelineConfig) -> dict[str, object]:
    """What `try_model` is told besides of a model that gets an adapter."""
    adapter = new_adapter(config)
    return {"adapter": asdict(adapter.settings)} if adapter else {}


@stage("base", "tokenizer", settings=["model.*"], verb="prepare_tokenizer")
def base_tokenizer(session: Session, attempt: Attempt) -> Produced:
    """The tokenizer of the run: the model's own, or one built from the prompts."""
    with tempfile.TemporaryDirectory() as scratch:
        source = tokenizer_folder(session.config, session.prompts, Path(scratch))
        own = Path(scratch) / "own"
        own.mkdir()
        for path in [source / name for name in TOKENIZER_FILES if (source / name).is_file()]:
            shutil.copyfile(path, own / path.name)
        write_trained_template(session.config.model, own)
        return Produced(_copied(attempt, own.iterdir()))


def write_trained_template(model: ModelConfig, folder: Path) -> None:
    """Makes the chat template of a folder with a tokenizer the one that the run trains with, where the config has one or values for it."""
    if model.chat_template or model.chat_template_args:
        trained = ChatTokenizer.from_folder(folder, model.chat_template, model.chat_template_args)
        write_template(folder, trained.template_text)


def _copied(attempt: Attempt, paths: Iterable[Path]) -> list[FileRecord]:
    files = sorted(path for path in paths if path.is_file())
    assert files, "a model's folder was empty, which preflight refuses"
    return [write_file(attempt.store, attempt.folder, attempt.name, path.name, path) for path in files]


def tokenizer_folder(config: PipelineConfig, prompts: PromptSets, scratch: Path) -> Path:
    """Where the tokenizer of a new run is: in the model's folder, or in `scratch`, built of the prompts."""
    if config.model.path:
        return model_folder(config.model)
    uses = ("rl", "evaluation") if config.sets("rl") else ("evaluation",)
    texts = [prompt for use in uses for rows in prompts(use) for prompt in rows[:TOKENIZER_TEXTS_MAX]]
    build_tokenizer([content_text(message) for prompt in texts for message in prompt.messages], scratch)
    return scratch


@stage("base", "policy", settings=["model.*"], verb="prepare_model")
async def base_policy(session: Session, attempt: Attempt, *, tokenizer: ArtifactRef) -> Produced:
    """The base model: copied from `model.path`, or new from the seed (made by the trainer)."""
    model = session.config.model
    if model.path:
        source = await asyncio.to_thread(model_folder, model)
        own = await asyncio.to_thread(materialise, session.run.store, tokenizer, session.work_dir / "tokenizer")
        files = [source / name for name in MODEL_FILES] + [own / name for name in TOKENIZER_FILES] + weight_files(source)
        return Produced(await asyncio.to_thread(_copied, attempt, files), weight_version=0)
    new = _new_model(model, await asyncio.to_thread(lambda: session.tokenizer), session.config.seed)
    load = LoadJob(f"{attempt.folder}/new", new, policy=None, state=None)
    return (await save_loaded(session, load, attempt)).produced({}, weight_version=0)


@stage("base", "probe", settings=["model.*"], verb="prepare_probe")
async def base_probe(session: Session, attempt: Attempt, *, policy: ArtifactRef) -> Produced:
    """The probe of a base model that was copied, and so not saved by the trainer."""
    load = LoadJob(f"{policy.folder}/fresh", None, policy=policy, state=None, adapter=new_adapter(session.config))
    return (await save_loaded(session, load, attempt, policy=False)).produced({}, weight_version=None)


@stage("base", "reference", settings=["rl.reference"], verb="prepare_reference")
def base_reference(session: Session, attempt: Attempt, *, tokenizer: ArtifactRef) -> Produced:
    """The reference of the KL where `rl.reference` names one, copied: a later start has the same, whatever became of it there."""
    store = session.run.store
    with tempfile.TemporaryDirectory(dir=session.work_dir) as scratch:
        name = session.config.rl.reference
        policy = reference_policy(store, name) if name.startswith(RUN) else None
        source = whole_policy(store, policy, Path(scratch)) if policy else reference_folder(session.config)
        own = _committed_tokenizer(store, tokenizer)
        check_vocabulary(name, own, (source / "tokenizer.json").read_bytes())
        files = [source / name for name in MODEL_FILES | TOKENIZER_FILES] + weight_files(source)
        return Produced(_copied(attempt, files), {"source": policy.as_json() if policy else str(source)})


def reference_policy(store: Store, name: str) -> ArtifactRef:
    """The newest policy of the run that `rl.reference` names; UserError when it has none."""
    try:
        source = open_existing(store, name.removeprefix(RUN))
    except UserError as error:
        raise UserError(f"rl.reference={name!r}: {error}") from error
    if not source.sft_complete or not source.has_base:
        raise UserError(f"rl.reference={name!r}: the SFT of that run is not complete, so it has no policy yet")
    return source.policy(source.num_iterations)[0]


def reference_folder(config: PipelineConfig) -> Path:
    """The local folder of `rl.reference` where that is no run; UserError as `model_folder`."""
    return model_folder(config.model.model_copy(update={"path": config.rl.reference}), "rl.reference")


def check_reference(config: PipelineConfig, run: Run | None, prompts: PromptSets, scratch: Path) -> None:
    """UserError unless the reference has the vocabulary of a run: of its tokenizer, or of the one that it would get."""
    name = config.rl.reference
    if run is not None and name.startswith(RUN):
        policy = reference_policy(run.store, name)
        whole = base_of(run.store, policy) or policy  # an adapter has the tokenizer of its base
        other = _committed_tokenizer(run.store, whole)
    else:
        other = (reference_folder(config) / "tokenizer.json").read_bytes()
    committed = run.artifact("base", 0, "tokenizer") if run is not None else None
    if run is not None and committed is not None:
        own = _committed_tokenizer(run.store, committed[0])
    else:
        own = (tokenizer_folder(config, prompts, scratch) / "tokenizer.json").read_bytes()
    check_vocabulary(name, own, other)


def _committed_tokenizer(store: Store, ref: ArtifactRef) -> bytes:
    return read_small_file(store, ref, "tokenizer.json")


def check_vocabulary(name: str, own: bytes, other: bytes) -> None:
    """UserError unless both tokenizer.json give the same number to each token: the reference is asked about the policy's tokens."""
    policy, reference = (_vocabulary(name, document) for document in (own, other))
    differ = sorted({token for token, _ in policy.items() ^ reference.items()})
    if differ:
        raise UserError(
            f"rl.reference={name!r}: its vocabulary is another one, {len(differ):,} tokens differ, for example {differ[0]!r}; use a model "
            "with the tokenizer of this run's"
        )


def _vocabulary(name: str, tokenizer: bytes) -> dict[str, int]:
    try:
        tree = json.loads(tokenizer)
        tokens = tree["model"]["vocab"]
        numbered = tokens if isinstance(tokens, dict) else {entry[0]: number for number, entry in enumerate(tokens)}
        return numbered | {entry["content"]: entry["id"] for entry in tree["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"rl.reference={name!r}: a tokenizer.json cannot be compared ({error!r:.100})") from error


def _new_model(model: ModelConfig, tokenizer: ChatTokenizer, seed: int) -> NewModel:
    """A new Qwen3 of the given shape."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return NewModel({**new_config(model, tokenizer.vocab_size), **ends}, seed)


def new_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """A Qwen3 of the given shape, as HF's config says it."""
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
