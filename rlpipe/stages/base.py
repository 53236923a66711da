"""What everything starts from: the tokenizer and the base model, copied into the store so that a run is whole by itself."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlpipe.config import ModelConfig, PipelineConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.data.prompt import Prompt
from rlpipe.data.tiny_tokenizer import build_tokenizer
from rlpipe.stages.commit import Produced, StageKey, run_stage
from rlpipe.stages.session import Session
from rlpipe.stages.training import probe_of, save_body
from rlpipe.store.artifacts import write_file
from rlpipe.types import ArtifactRef, FileRecord, JsonDict, StageResult, UserError
from rlpipe.weights import tensor_shapes

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
TOKENIZER_TEXTS_MAX = 2000
PromptSets = Callable[[str], list[list[Prompt]]]  # the prompt sets of a use


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

    async def produce(folder: str, attempt: str) -> Produced:
        return Produced(await asyncio.to_thread(_write_tokenizer, session, folder, attempt))

    return await run_stage(session, StageKey("base", 0, "tokenizer"), {}, produce)


def _write_tokenizer(session: Session, folder: str, attempt: str) -> list[FileRecord]:
    with tempfile.TemporaryDirectory() as scratch:
        source = tokenizer_folder(session.config, session.prompts, Path(scratch))
        weights = {path for pattern in WEIGHT_FILES for path in source.glob(pattern)}
        files = sorted(path for path in source.iterdir() if path.is_file() and path not in weights)
        return [write_file(session.run.store, folder, attempt, path.name, path) for path in files]


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

    async def produce(folder: str, attempt: str) -> Produced:
        if session.config.model.path:
            return Produced(await asyncio.to_thread(_copy_model, session, folder, attempt), weight_version=0)
        gang = await session.gang()
        new = {"config": _new_config(session.config.model, session.tokenizer()), "seed": session.config.seed}
        load = {"position": f"{folder}/new", "new": new, "policy": None, "state": None}
        await gang.run("load", load)
        save = await asyncio.to_thread(save_body, session, folder, None, attempt)
        saved = await gang.run("save", {"position": load["position"], **save})
        return Produced([FileRecord(**record) for record in saved["policy"]], probe_of(save, saved), weight_version=0)

    return await run_stage(session, StageKey("base", 0, "policy"), {"tokenizer": tokenizer}, produce)


async def base_probe(session: Session, policy: ArtifactRef) -> StageResult:
    """The probe of a base model that was copied, and so not saved by the trainer."""

    async def produce(folder: str, attempt: str) -> Produced:
        gang = await session.gang()
        load = {"position": f"{policy.folder}/fresh", "new": None, "policy": policy.as_json(), "state": None}
        await gang.run("load", load)
        save = await asyncio.to_thread(save_body, session, None, None, attempt)
        return Produced([], probe_of(save, await gang.run("save", {"position": load["position"], **save})))

    return await run_stage(session, StageKey("base", 0, "probe"), {"policy": policy}, produce)


def _copy_model(session: Session, folder: str, attempt: str) -> list[FileRecord]:
    source = model_folder(session.config.model)
    files = sorted(path for path in source.iterdir() if path.is_file() and path.suffix in (".json", ".safetensors", ".jinja"))
    return [write_file(session.run.store, folder, attempt, path.name, path) for path in files]


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
