"""What everything starts from: the tokenizer and the base model, copied into the store so that a run is whole by itself."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from rlpipe.config import ModelConfig, PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.tiny_tokenizer import build_tokenizer
from rlpipe.stages.commit import Attempt, Produced, StageKey, run_stage
from rlpipe.stages.session import PromptSets, Session
from rlpipe.stages.training import save
from rlpipe.store.artifacts import write_file
from rlpipe.types import ArtifactRef, FileRecord, JsonDict, StageResult, UserError
from rlpipe.weights import tensor_shapes

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
TOKENIZER_TEXTS_MAX = 2000


def model_folder(model: ModelConfig) -> Path:
    """The local folder of `model.path`; UserError when it is no model in HF format."""
    folder = Path(model.path).expanduser()
    if folder.suffix == ".gguf":
        raise UserError(
            f"model.path={model.path!r} is a GGUF file: make a folder of it with rlpipe import-gguf {model.path} FOLDER"
        )
    if not folder.is_dir():
        if model.path.startswith(("/", "~", ".")):  # no name of the hub
            hint = "`make smollm2` makes the one of preset smollm2, `rlpipe import-gguf FILE FOLDER` one of any GGUF file"
            raise UserError(f"model.path={model.path!r}: there is no such folder; {hint}")
        folder = _from_hub(model.path)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if missing or not any(folder.glob("*.safetensors")):
        wanted = ", ".join(missing or ["*.safetensors"])
        raise UserError(f"model.path={model.path!r} is no model in HF format: {wanted} is missing; empty builds a new model")
    tensor_shapes(folder)
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"model.path={name!r} is neither a folder nor a model of the hub that can be reached ({error})"
        ) from error


async def base_tokenizer(session: Session) -> StageResult:
    """The tokenizer of the run: the model's own, or one built from the prompts."""
    return await run_stage(session, StageKey("base", 0, "tokenizer"), {}, partial(_write_tokenizer, session))


def _write_tokenizer(session: Session, attempt: Attempt) -> Produced:
    with tempfile.TemporaryDirectory() as scratch:
        source = tokenizer_folder(session.config, session.prompts, Path(scratch))
        weights = {path for pattern in WEIGHT_FILES for path in source.glob(pattern)}
        return Produced(_copied(attempt, set(source.iterdir()) - weights))


def _copied(attempt: Attempt, paths: set[Path]) -> list[FileRecord]:
    files = sorted(path for path in paths if path.is_file())
    return [write_file(attempt.store, attempt.folder, attempt.name, path.name, path) for path in files]


def tokenizer_folder(config: PipelineConfig, prompts: PromptSets, scratch: Path) -> Path:
    """Where the tokenizer of a new run is: in the model's folder, or in `scratch`, built of the prompts."""
    if config.model.path:
        return model_folder(config.model)
    uses = ("rl", "evaluation") if config.sets("rl") else ("evaluation",)
    texts = [prompt for use in uses for rows in prompts(use) for prompt in rows[:TOKENIZER_TEXTS_MAX]]
    build_tokenizer([str(message["content"]) for prompt in texts for message in prompt.messages], scratch)
    return scratch


async def base_policy(session: Session, tokenizer: ArtifactRef) -> StageResult:
    """The base model: copied from `model.path`, or new from the seed (made by the trainer)."""

    def copy(attempt: Attempt) -> Produced:
        source = model_folder(session.config.model)
        files = {path for path in source.iterdir() if path.suffix in (".json", ".safetensors", ".jinja")}
        return Produced(_copied(attempt, files), weight_version=0)

    async def make(attempt: Attempt) -> Produced:
        new = {"config": _new_config(session.config.model, session.tokenizer), "seed": session.config.seed}
        position = f"{attempt.folder}/new"
        await (await session.gang()).run("load", {"position": position, "new": new, "policy": None, "state": None})
        saved = await save(session, position, attempt)
        return Produced(saved.policy, saved.probe, weight_version=0)

    produce = copy if session.config.model.path else make
    return await run_stage(session, StageKey("base", 0, "policy"), {"tokenizer": tokenizer}, produce)


async def base_probe(session: Session, policy: ArtifactRef) -> StageResult:
    """The probe of a base model that was copied, and so not saved by the trainer."""

    async def produce(attempt: Attempt) -> Produced:
        position = f"{policy.folder}/fresh"
        load = {"position": position, "new": None, "policy": policy.as_json(), "state": None}
        await (await session.gang()).run("load", load)
        return Produced([], (await save(session, position, attempt, policy=False)).probe)

    return await run_stage(session, StageKey("base", 0, "probe"), {"policy": policy}, produce)


def _new_config(model: ModelConfig, tokenizer: ChatTokenizer) -> JsonDict:
    """The HF config of a new Qwen3 of the given shape."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "initializer_range": model.init_std,
        "tie_word_embeddings": True,
        "max_position_embeddings": model.context_tokens_max,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
