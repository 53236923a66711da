"""A GGUF file (llama.cpp's format) to a model folder in HF format:
`.venv/bin/python scripts/import_gguf.py FILE FOLDER`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import psutil

from rlpipe.base.errors import UserError

NEEDED = ("gguf", "accelerate")
BLOCK = re.compile(r"blk\.(\d+)\.")
UNREADABLE = (
    ValueError,
    LookupError,
    OSError,
    RuntimeError,
    struct.error,
)  # what transformers raises for torn or unknown files
# llama.cpp's `tokenizer.ggml.pre` of byte-level BPE, as src/llama-vocab.cpp defines them.
# transformers 5.23 knows neither kind, and splits both as GPT-2 does; with "smollm" a digit is a
# word of its own: "\n\n1." is ["\n\n", "1", "."], and not ["\n", "\n", "1", "."]
GPT2_SPLITS = {"default", "gpt-2", "mpt", "olmo", "jais"}
DIGIT_SPLITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}


def import_gguf(file: Path, folder: Path) -> None:
    """Writes `folder`: float32 safetensors, config, tokenizer and chat template of a
    GGUF file, whole or not at all.

    UserError when the file cannot be read or its tokenizer cannot be
    rebuilt, or when `folder` exists.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be installed to read GGUF files: pip install -c constraints.txt -e '.[gguf]'"
        )
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file}: not a GGUF file")
    if folder.exists():
        raise UserError(f"{folder} exists; remove it first, or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = _building(folder)
    try:
        _write_tokenizer(file, building, _write_model(file, building))
        for path in building.iterdir():
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _building(folder: Path) -> Path:
    """A new folder beside `folder`, named after this process; what
    killed processes left is removed."""
    prefix = f".{folder.name}.importing-"
    for path in folder.parent.glob(f"{prefix}*"):
        pid = int(path.name.removeprefix(prefix))
        if pid == os.getpid() or not psutil.pid_exists(pid):  # in containers, ids come again
            shutil.rmtree(path)
    building = folder.with_name(f"{prefix}{os.getpid()}")
    building.mkdir()
    return building


def _write_model(file: Path, folder: Path) -> Any:
    """Writes weights and configs; returns the config."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        both: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except UNREADABLE as error:
        raise UserError(f"{file}: transformers cannot load it ({type(error).__name__}: {error})") from error
    loaded, told = both
    _check_whole(file, told)
    config = loaded.config
    del config.quantization_config  # the weights are not quantized any more
    # the loaded model cannot be saved; on the meta device nothing is initialised, and rotary
    # frequencies are in no file
    with torch.device("meta"):
        fresh: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    broken = [name for name, tensor in fresh.named_parameters() if not torch.isfinite(tensor).all()]
    if broken:
        raise UserError(f"{file}: {broken[0]} holds values that are not finite")
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(folder)
    return config


def _check_whole(file: Path, told: dict[str, Any]) -> None:
    """UserError naming the tensors of a model that are not the file's, which transformers fills
    with random numbers, or the file's that are not the model's. A file without an output layer is
    one whose layer is that of the embeddings: nobody can tell."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, named = read_gguf_metadata(str(file))
    blocks = int(metadata.get(f"{metadata.get('general.architecture')}.block_count", len(named)))
    faults = [f"{name} is missing" for name in sorted(told["missing_keys"])]
    faults += [
        f"{name} has the shape {[*there]}, the model's has {[*own]}"
        for name, there, own in sorted(told["mismatched_keys"])
    ]
    faults += [f"{name} is unknown" for name in sorted(told["unexpected_keys"])]
    faults += [
        f"{name} is beyond its {blocks} blocks"
        for name in named
        if (block := BLOCK.match(name)) and int(block[1]) >= blocks
    ]
    if faults:
        raise UserError(
            f"{file}: {len(faults)} tensors are not as its model has them: {'; '.join(faults[:3])}; "
            "get the whole file, of several parts all in one"
        )


def _write_tokenizer(file: Path, folder: Path, config: Any) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except UNREADABLE as error:
        raise UserError(f"{file}: its tokenizer cannot be rebuilt ({type(error).__name__}: {error})") from error
    _correct_splits(file, tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    saved: dict[str, Any] = json.loads(path.read_text())
    kept = {name: value for name, value in saved.items() if re.fullmatch(r".*_token|.*_tokens|chat_template", name)}
    # a class that transformers 4 has too: vLLM's and SGLang's environments
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings["model_max_length"] = config.get_text_config().max_position_embeddings
    path.write_text(json.dumps(kept | settings, indent=2, sort_keys=True) + "\n")


def _correct_splits(file: Path, tokenizer: Any) -> None:
    """Makes a byte-level tokenizer split text into words as the model's own did; UserError when it
    is not known how that was."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(file))
    kind = metadata.get("tokenizer.ggml.pre", "default")
    if metadata["tokenizer.ggml.model"] != "gpt2" or kind in GGUF_PRE_TOKENIZER_SPLITS or kind in GPT2_SPLITS:
        return
    if kind not in DIGIT_SPLITS:
        raise UserError(
            f"{file}: how its tokenizer splits text into words (tokenizer.ggml.pre={kind!r}) is not known "
            "here, and a guess would train the model on tokens that it has never seen; "
            "use the model's own folder in HF format"
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def main() -> None:
    """Exit code 2, with the reason, when nothing was made."""
    parser = argparse.ArgumentParser(
        description=(
            "Make a model folder in HF format (float32) of a GGUF file, for model.path. "
            "Needs the packages of rlpipe[gguf]."
        )
    )
    parser.add_argument("file", type=Path, help="a .gguf file")
    parser.add_argument("folder", type=Path, help="the model folder to make; it must not exist")
    arguments = parser.parse_args()
    from transformers.utils import logging

    logging.set_verbosity_error()  # what is missing is said by us
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        import_gguf(arguments.file, arguments.folder.expanduser())
    except (UserError, OSError) as error:
        # a full disk, or a folder that another process made meanwhile
        print(f"import_gguf: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(f"{arguments.folder}: a model in HF format")


if __name__ == "__main__":
    main()
