"""A folder of a small real model, the ways in which it can be damaged,
and how preflight looks at it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.base.errors import UserError
from rlpipe.checks import trial as model_trial
from rlpipe.config.model import ModelConfig
from rlpipe.config.source import read_config
from rlpipe.data import trial as tokenizer_trial
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.data.trial import TokenizerTrial
from rlpipe.records.prompt import Prompt
from rlpipe.stages.model_source import model_folder
from tests.engine_fixtures import tiny_model
from tests.paths import PRESETS

WEIGHTS, SECRET = "model.safetensors", "../secret"
RAW: dict[str, bytes] = {
    "empty": b"", "cut": b'{"model_type": "qw', "a list": b"[]", "null": b"null",
    "text": b'"qwen3"', "binary": b"\xff\xfe\x00",
    "brackets": b"[" * 200_000, "a huge number": b'{"vocab_size": 1' + b"0" * 5000 + b"}", "zeros": b"\0" * 64,
}  # fmt: skip
CONFIG: dict[str, tuple[dict[str, Any], str]] = {  # name -> (fields of config.json, what is named)
    "no type": ({"model_type": None}, "model_type"), "an unknown type": ({"model_type": "qwen9"}, "qwen9"),
    "a type of a number": ({"model_type": 5}, "model_type=5"),
    "no causal model": ({"model_type": "t5"}, "t5"), "vision": ({"model_type": "vit"}, "vit"),
    "another family": ({"model_type": "llama"}, "q_norm.weight is unknown"),
    "heads that do not divide": ({"num_attention_heads": 3}, ""), "no heads": ({"num_attention_heads": 0}, ""),
    "more key heads": ({"num_key_value_heads": 64}, ""),
    "a head of nothing": ({"head_dim": 0}, ""), "an odd head": ({"head_dim": 15}, "head_dim"),
    "hidden of text": ({"hidden_size": "64"}, "hidden_size"),
    "negative hidden": ({"hidden_size": -64}, "-64"), "another hidden": ({"hidden_size": 256}, "256"),
    "huge hidden": ({"hidden_size": 10**9}, "1000000000"),
    "hidden beyond numbers": ({"hidden_size": 10**30}, ""),
    "more layers": ({"num_hidden_layers": 9, "layer_types": None}, "layers.4"),
    "layers of another number": ({"num_hidden_layers": 9}, "num_hidden_layers"),
    "a million layers": ({"num_hidden_layers": 10**6, "layer_types": None}, "num_hidden_layers=1000000"),
    "layers of text": ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    "layers of no kind": ({"layer_types": ["x"] * 4}, "layer_types"),
    "another width": ({"intermediate_size": 7}, "has the shape"), "another vocabulary": ({"vocab_size": 9}, ""),
    "no vocabulary": ({"vocab_size": 0}, ""),
    "activation": ({"hidden_act": "no_such"}, "no_such"),
    "rope": ({"rope_parameters": {"rope_type": "no_such"}}, "no_such"), "rope of a list": ({"rope_parameters": []}, ""),
    "an epsilon of text": ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    "few positions": ({"max_position_embeddings": 100}, "max_position_embeddings=100"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
    "soft caps": ({"final_logit_softcapping": 30.0, "model_type": "gemma2"}, ""),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "padding that is no token": ({"pad_token_id": 10**9}, ""),
    "tied or not": ({"tie_word_embeddings": "x"}, "tie_word_embeddings"),
}  # fmt: skip
LOOP, FULL = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 10**10 }}"
CALLS_ITSELF = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
TOKENIZER: dict[str, tuple[str, dict[str, Any], str]] = {  # name -> (file, its fields, what is named)
    "no model": ("tokenizer.json", {"model": None}, "tokenizer"),
    "a model of text": ("tokenizer.json", {"model": "BPE"}, "tokenizer"),
    "an unknown model": ("tokenizer.json", {"model": {"type": "Nope", "vocab": {}}}, "tokenizer"),
    "a vocabulary of lists": ("tokenizer.json", {"model": {"type": "BPE", "vocab": [1, 2], "merges": []}}, "tokenizer"),
    "no vocabulary": ("tokenizer.json", {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
                      "eos_token"),
    "added tokens of text": ("tokenizer.json", {"added_tokens": "x"}, "tokenizer"),
    "an unknown decoder": ("tokenizer.json", {"decoder": {"type": "Nope"}}, "tokenizer"),
    "an end that is no token": ("tokenizer_config.json", {"eos_token": "<|nope|>"}, "eos_token"),
    "no end": ("tokenizer_config.json", {"eos_token": None}, "eos_token"),
    "an end of a number": ("tokenizer_config.json", {"eos_token": 3}, "eos_token"),
    "padding that is no token": ("tokenizer_config.json", {"pad_token": "<|nope|>"}, "pad_token"),
    "a template of a number": ("tokenizer_config.json", {"chat_template": 5}, "chat_template"),
    "templates of another form": ("tokenizer_config.json", {"chat_template": [{"x": 1}]}, "chat_template"),
    "no template": ("tokenizer_config.json", {"chat_template": ""}, "chat template"),
    "a template that does not parse": ("tokenizer_config.json", {"chat_template": "{% for %}"}, "chat_template"),
    "a template that raises": ("tokenizer_config.json",
                               {"chat_template": "{{ raise_exception('no') }}"}, "chat template"),
    "a template that divides by zero": ("tokenizer_config.json", {"chat_template": "{{ 1 / 0 }}"}, "chat template"),
    "a template of missing things": ("tokenizer_config.json",
                                     {"chat_template": "{{ messages[9].content.x }}"}, "chat template"),
    "a template that adds text and numbers": ("tokenizer_config.json",
                                              {"chat_template": "{{ 1 + 'a' }}"}, "chat template"),
    "a template that calls itself": ("tokenizer_config.json", {"chat_template": CALLS_ITSELF}, "chat template"),
    "a template that reaches out": ("tokenizer_config.json",
                                    {"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat template"),
    "a template that never ends": ("tokenizer_config.json", {"chat_template": LOOP}, "chat template"),
    "a template that takes all memory": ("tokenizer_config.json", {"chat_template": FULL}, "MemoryError"),
}  # fmt: skip
HEAVY = ("a template that never ends", "a template that takes all memory")  # only a process of its own stops them
NAMED: dict[str, str] = {  # files of JSON -> what is named when one is no object
    "config.json": "config.json", "tokenizer.json": "tokenizer.json", "tokenizer_config.json": "tokenizer_config.json",
    "special_tokens_map.json": "special_tokens_map.json", "generation_config.json": "generation_config.json",
}  # fmt: skip


class Damage(NamedTuple):
    """One fault of a model's folder. `words`: what the refusal names."""

    name: str
    do: Callable[[Path], object]
    words: str


def make_folder(folder: Path) -> Path:
    """A model that can be used."""
    shutil.copytree(tiny_model(0), folder)
    build_tokenizer(["What is the word?", "What is the sum?"], folder)
    return folder


def change(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _changed(name: str, fields: dict[str, Any]) -> Callable[[Path], object]:
    return lambda folder: change(folder, name, **fields)


def _written(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _tensors(how: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def do(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        how(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return do


def _valued(name: str, value: float) -> Callable[[Path], object]:
    def change_last(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return _tensors(change_last)


def _indexed(index: bytes) -> Callable[[Path], object]:
    def do(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_bytes(index)

    return do


def _cut(name: str, share: float) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((data := (folder / name).read_bytes())[: int(len(data) * share)])


def _linked(name: str, target: str) -> Callable[[Path], object]:
    def do(folder: Path) -> None:
        (folder.parent / "secret").write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return do


def _chained(folder: Path) -> None:
    _linked("first.json", SECRET)(folder)
    (folder / "vocab.json").symlink_to("first.json")


def damages() -> Iterator[Damage]:
    """All of them."""
    for name, words in NAMED.items():
        yield from (Damage(f"{name} is {what}", _written(name, data), words) for what, data in RAW.items())
    yield from (
        Damage(f"config.json: {name}", _changed("config.json", fields), words)
        for name, (fields, words) in CONFIG.items()
    )
    for name, (file, fields, words) in TOKENIZER.items():
        yield Damage(f"{file}: {name}", _changed(file, fields), words)
    yield Damage(
        "chat_template.jinja is binary", _written("chat_template.jinja", b"\xff\xfe\x00"), "chat_template.jinja"
    )
    for end in ("x", [None], 10**30, True, {}):
        yield Damage(
            f"generation_config.json: ends with {end!r}",
            _changed("generation_config.json", {"eos_token_id": end}),
            "eos_token_id",
        )
    for name in ("config.json", "tokenizer.json", WEIGHTS):
        yield Damage(f"{name} is away", lambda folder, name=name: (folder / name).unlink(), name.replace("model", "*"))
    yield from (
        Damage(f"{WEIGHTS} is cut to {share:.0%}", _cut(WEIGHTS, share), WEIGHTS) for share in (0, 0.001, 0.5, 0.999)
    )
    yield Damage(f"{WEIGHTS} is a pickle", _written(WEIGHTS, b"\x80\x04K\x01."), WEIGHTS)
    yield Damage(f"{WEIGHTS} with a header of huge length", _written(WEIGHTS, b"\xff" * 7 + b"\x00" + b"{}"), WEIGHTS)
    norm = "model.norm.weight"
    yield Damage("a tensor is missing", _tensors(lambda tensors: tensors.pop(norm)), f"{norm} is missing")
    yield Damage("a tensor more", _tensors(lambda tensors: tensors.update(other=torch.zeros(1))), "other is unknown")
    yield Damage(
        "a tensor of another shape",
        _tensors(lambda tensors: tensors.update({norm: torch.zeros(7)})),
        f"{norm} has the shape [7]",
    )
    for odd in (torch.nan, torch.inf, -torch.inf):
        for name in (norm, "model.embed_tokens.weight"):
            yield Damage(
                f"{name} with {odd}", _valued(name, odd), f"{name} of {WEIGHTS} holds values that are NaN or infinite"
            )
    yield Damage("no tensors", _tensors(dict.clear), "is missing")
    for index in (
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"x": 5}}',
        b'{"weight_map": {}}',
        b"[" * 200_000,
    ):
        yield Damage(f"an index of {index[:30].decode()!r}", _indexed(index), "safetensors")
    for name in ("vocab.json", "config.json", "chat_template.jinja"):
        yield Damage(f"{name} is a link out", _linked(name, SECRET), f"{name} is a link to ")
    yield Damage("a chain of links out", _chained, "vocab.json is a link to ")
    yield Damage("a link to a folder", _linked("merges.txt", "/"), "merges.txt is a link to /,")
    yield Damage("weights of a device", _linked(WEIGHTS, "/dev/zero"), "*.safetensors")
    yield Damage("a link to itself", _linked("tokenizer.json", "tokenizer.json"), "tokenizer.json is missing")
    yield Damage(
        "an index that leads out", _indexed(b'{"weight_map": {"x": "../secret.safetensors"}}'), "secret.safetensors"
    )
    yield Damage("an index of what is gone", _indexed(b'{"weight_map": {"x": "gone.safetensors"}}'), "gone.safetensors")


def harmless() -> Iterator[Damage]:
    """What is taken, and why that does no harm."""
    # transformers reads neither
    yield Damage("odd fields", _changed("config.json", {"no_such": [1], "architectures": "x"}), "")
    # no token has that number, so none of them ends a text; those of the chat template do
    yield Damage("an end below zero", _changed("generation_config.json", {"eos_token_id": -1}), "")
    yield Damage("no generation_config.json", lambda folder: (folder / "generation_config.json").unlink(), "")
    # that of one whole file is not read, as transformers does
    yield Damage("an index beside a whole file", _written(f"{WEIGHTS}.index.json", b"[]"), "")


def look_at_model(folder: Path) -> None:
    """As preflight does, in this process."""
    found = model_folder(read_config("smollm2", [f"model.path={folder}"], PRESETS).model)
    model_trial.load({"where": f"model.path={found}", "folder": str(found), "context_tokens_max": 128})


def look_at_tokenizer(folder: Path) -> None:
    """The same; its bound on memory would be one of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_trial.resource, "setrlimit", lambda *_: None)
        _, answer = tokenizer_trial.load(
            {"folder": str(folder), "chat_template": "", "variables": {}, "control_tokens": "text"}
        )
        told = answer({"prompts": [["hi/0", [{"role": "user", "content": "What is the word?"}], None]]})
        if "error" in told:
            raise UserError(str(told["error"]))


def look_at(folder: Path, damage: Damage) -> None:
    """All that preflight looks at in a folder; what only a process of its
    own can stop is looked at in one."""
    look_at_model(folder)
    if not damage.name.endswith(HEAVY):
        look_at_tokenizer(folder)
        return
    with closing(TokenizerTrial(folder, ModelConfig())) as trial:
        list(trial.prompt_lengths([Prompt("hi/0", "hi", [{"role": "user", "content": "hi"}], None)]))
