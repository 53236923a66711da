"""The families of transformers and how they are trained, by a small new model of
each: the table in docs/models.md.

`.venv/bin/python scripts/models_table.py` prints it; `--write` puts it into the page.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.base.errors import UserError
from rlpipe.extras.local_engine.model import LocalModel
from rlpipe.models.causal import empty_model, restore_buffers, small_windows, takes
from rlpipe.models.small import VOCABULARY, small_config, small_model
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.packing import Rows
from rlpipe.trainer.probe_rows import LENGTHS, own_logprobs, row_logprobs, sequence
from rlpipe.trainer.selftest import prove
from scripts.page_table import PageTable

TABLE = PageTable("docs/models.md", "<!-- families: scripts/models_table.py -->", "<!-- end of families -->")
REASONS = ("looks ahead", "has no base model")
# numbers that go together in a family's own way
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2,
                         "layer_types": ["mamba", "attention"] * 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2}, "ministral": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
                  "mamba_d_state": 16, "mamba_chunk_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2}, "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "qwen4_exp_text": {"head_dim": 8, "num_key_value_heads": 2}, "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"mamba_headdim": 8},
    "xlnet": {"d_head": 8},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A family: how it is trained, the largest |difference| of a logprob to the model's own forward
    pass, or why it is not, and whether the local engine serves it."""

    family: str
    rows: str
    largest: float | str
    local: bool = False

    def __str__(self) -> str:
        largest = self.largest if isinstance(self.largest, str) else f"{self.largest:.0e}"
        return f"| {self.family} | {self.rows} | {largest} | {'yes' if self.local else 'no'} |"


def try_family(family: str) -> Row:
    """A small new model of the family, packed and one a row, beside its own forward pass."""
    try:
        lm = small_model(small_config(AutoConfig.for_model(family), **OWN.get(family, {})))
        policy = PolicyModel(lm)
        chosen = prove(policy, torch.device("cpu")).rows(family, "float32")
        largest = _largest(policy, PolicyModel(_loaded(lm)), min(chosen, Rows.PACKED))
        _train(lm)
    except UserError as error:
        if "cannot be built" in str(error):
            return Row(family, "not tried", "cannot be built with these numbers")
        return Row(
            family, "refused", next((why for why in REASONS if why in str(error)), str(error).splitlines()[0][:60])
        )
    except Exception as error:  # whatever the family's own code says of small numbers
        return Row(family, "not tried", f"`{str(error).splitlines()[0][:60]}`" if str(error) else type(error).__name__)
    return Row(family, "packed" if chosen >= Rows.PACKED else "one a row", largest, _is_served(lm))


def _loaded(lm: Any) -> Any:
    """The model again, as the trainer makes it: on the meta device, then buffers, then weights."""
    loaded = empty_model(lm.config).to_empty(device="cpu")
    restore_buffers(loaded)
    loaded.load_state_dict(lm.state_dict())
    return loaded


def _largest(policy: PolicyModel, loaded: PolicyModel, rows: Rows) -> float:
    texts = [sequence(length, VOCABULARY, 0) for length in LENGTHS]
    device = torch.device("cpu")
    with small_windows(policy.lm.config), small_windows(loaded.lm.config):
        own, given = own_logprobs(policy, texts, device), row_logprobs(loaded, texts, rows, device)
    return float((torch.cat(given).double() - torch.cat(own).double()).abs().max())


def _train(lm: Any) -> None:
    """A backward pass."""
    given = {"use_cache": False} if takes(lm, "use_cache") else {}
    lm(input_ids=torch.arange(20)[None], labels=torch.arange(20)[None], **given).loss.backward()
    lm.zero_grad()


def _is_served(lm: Any) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        try:
            LocalModel(folder, "cpu", 1)
        except UserError:
            return False
    return True


def table() -> str:
    families = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})
    return "\n".join(
        [
            "| family | rows | largest difference | local engine |",
            "| --- | --- | --- | --- |",
            *(str(try_family(family)) for family in families),
        ]
    )


def in_page() -> dict[str, tuple[str, bool]]:
    """How the page says that each family is trained, and whether the local engine serves it."""
    lines = TABLE.lines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {row[0]: (row[1], row[3] == "yes") for row in rows}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    TABLE.show(table())
