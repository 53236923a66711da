"""scripts/import_gguf.py: a GGUF file written here becomes a folder with the same model and the
tokenizer it was trained with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from rlpipe.base.errors import UserError
from rlpipe.config.model import ModelConfig
from rlpipe.data.chat import ChatTokenizer
from rlpipe.stages.model_source import model_folder
from scripts.import_gguf import import_gguf
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIALS, *BYTES, "ĊĊ", "hi"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KV_HEADS, LAYERS = 4, 2, 2
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers.": "blk.",
}  # fmt: skip


def tiny_llama(tied: bool) -> Any:
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=8, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp's converter gives to the query and key projections."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


Tensors = list[tuple[str, np.ndarray]]
Odd = Callable[[str, np.ndarray], Tensors]


def same(name: str, values: np.ndarray) -> Tensors:
    return [(name, values)]


def write(path: Path, lm: Any, pre: str = "smollm", odd: Odd = same) -> Path:
    """`lm` as llama.cpp's converter writes it; `odd`: what becomes of a tensor."""
    config, writer = lm.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(["Ċ Ċ", "h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in lm.named_parameters():
        values = parameter.detach().numpy()
        values = (
            rotated(values, HEADS) if "q_proj" in name else rotated(values, KV_HEADS) if "k_proj" in name else values
        )
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        for written, tensor in odd("output.weight" if name == "lm_head.weight" else name, values):
            writer.add_tensor(written, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_holds_the_very_model(tmp_path: Path, tied: bool) -> None:
    lm = tiny_llama(tied)
    import_gguf(write(tmp_path / "m.gguf", lm), tmp_path / "made")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "made").eval()
    assert again.dtype == torch.float32 and not hasattr(again.config, "quantization_config")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    tokens = torch.arange(60)[None] % len(TOKENS)
    with torch.inference_mode():
        torch.testing.assert_close(again(tokens).logits, lm(tokens).logits)
    assert again.generation_config.eos_token_id == 2 and again.generation_config.pad_token_id == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["m.gguf", "made"]


def test_the_tokenizer_splits_as_the_models_own(tmp_path: Path) -> None:
    import_gguf(write(tmp_path / "m.gguf", tiny_llama(True)), tmp_path / "made")
    plain = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert plain.tokenize("hi:\n\n12\n\nhi") == [
        "hi",
        ":",
        "ĊĊ",
        "1",
        "2",
        "Ċ",
        "Ċ",
        "hi",
    ]  # GPT-2 splits both line breaks
    assert (plain.eos_token, plain.pad_token, plain.model_max_length) == ("<|im_end|>", "<|im_end|>", 128)
    chat = ChatTokenizer.from_folder(tmp_path / "made")
    talk = [{"role": "user", "content": "hi 1"}, {"role": "assistant", "content": "2"}]
    tokens, mask = chat.encode_conversation(talk)
    assert tokens == plain.apply_chat_template(talk, return_dict=True)["input_ids"]
    assert [TOKENS[token] for token, own in zip(tokens, mask, strict=True) if own] == ["2", "<|im_end|>"]
    assert chat.encode_prompt(talk[:1]) == tokens[: mask.index(1)]


def test_a_tokenizer_that_would_be_guessed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.pre='unheard-of'"):
        import_gguf(write(tmp_path / "m.gguf", tiny_llama(True), pre="unheard-of"), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "made")
    (tmp_path / "m.gguf").write_bytes(b"safetensors")
    with pytest.raises(UserError, match="not a GGUF file"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "made")
    whole = write(tmp_path / "whole.gguf", tiny_llama(True)).read_bytes()
    for size in (4, 40, 4000, len(whole) - 1000):
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"m\.gguf: transformers cannot load it"):
            import_gguf(tmp_path / "m.gguf", tmp_path / "made")
    (tmp_path / "made").mkdir()
    with pytest.raises(UserError, match="exists"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "made")


def only(chosen: str, *instead: tuple[str, Callable[[np.ndarray], np.ndarray]]) -> Odd:
    """In place of the tensors that begin so: others, made of each."""
    return lambda name, values: (
        [(other or name, make(values)) for other, make in instead] if name.startswith(chosen) else same(name, values)
    )


INCOMPLETE: dict[str, tuple[Odd, str]] = {
    "a tensor less": (only("blk.0.ffn_up"), r"1 tensors .*: model\.layers\.0\.mlp\.up_proj\.weight is missing"),
    "a block less": (only("blk.1."), r"9 tensors .*: model\.layers\.1\.input_layernorm\.weight is missing; "),
    "no embeddings": (only("token_embd"), r"model\.embed_tokens\.weight is missing"),
    "another shape": (only("blk.0.ffn_up", ("", lambda v: v[:-8])),
                      r"up_proj\.weight has the shape \[40, 32\], the model's has \[48, 32\]"),
    "a block more": (only("blk.1.ffn_up", ("", lambda v: v), ("blk.2.ffn_up.weight", lambda v: v)),
                     r"blk\.2\.ffn_up\.weight is beyond its 2 blocks"),
    "no numbers": (only("blk.1.ffn_up", ("", lambda v: v * np.nan)),
                   r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"),
    "infinite": (only("output_norm", ("", lambda v: v * np.inf)),
                 r"model\.norm\.weight holds values that are not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", INCOMPLETE)
def test_what_an_incomplete_file_lacks_is_named_and_nothing_is_made(name: str, tmp_path: Path) -> None:
    odd, said = INCOMPLETE[name]
    file = write(tmp_path / "m.gguf", tiny_llama(False), odd=odd)
    with pytest.raises(UserError, match=said):
        import_gguf(file, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_model_path_that_is_no_folder_says_what_makes_one(tmp_path: Path) -> None:
    for name, hint in (("m.gguf", "scripts/import_gguf\\.py"), ("none", "make smollm2")):
        with pytest.raises(UserError, match=hint):
            model_folder(ModelConfig(path=f"{tmp_path}/{name}"))


def test_what_a_killed_import_left_is_removed_by_the_next(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=DEADLINE_S)
    left = tmp_path / f".made.importing-{dead.pid}"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    import_gguf(write(tmp_path / "m.gguf", tiny_llama(True)), tmp_path / "made")
    assert not left.exists()
    shutil.rmtree(tmp_path / "made")


@pytest.mark.slow
def test_the_script_has_help_and_says_what_is_wrong(tmp_path: Path) -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "scripts/import_gguf.py", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    assert "a .gguf file" in script("--help").stdout
    refused = script(f"{tmp_path}/none.gguf", f"{tmp_path}/made")
    assert refused.returncode == 2 and "there is no such file" in refused.stderr, refused
    part = script(str(write(tmp_path / "part.gguf", tiny_llama(True), odd=only("blk.1."))), f"{tmp_path}/made")
    said = part.stderr.splitlines()[-1]  # after what shows how far it is
    assert part.returncode == 2 and said.startswith(f"import_gguf: {tmp_path}/part.gguf: 9 tensors"), part
    assert "initialized" not in part.stderr and "Traceback" not in part.stderr and not (tmp_path / "made").exists(), (
        part.stderr
    )
    made = script(str(write(tmp_path / "m.gguf", tiny_llama(True))), f"{tmp_path}/made")
    assert made.returncode == 0 and made.stdout == f"{tmp_path}/made: a model in HF format\n", made
    assert (tmp_path / "made" / "model.safetensors").is_file()
