"""The model of the engine: weights that are checked before they serve, and forward passes whose
shape depends on nothing but the request itself.

A matrix product may compute other bits for a row when the number of rows changes. So a prompt is
always computed in a block of `block_rows(P)` rows of P tokens, and a decode step gives the bits of
a step with all slots of its bucket, at its whole length; unused rows are padding. Fewer rows, a
shorter length and attention of fewer rows are computed where `PROOFS` steps have given these bits.
Where products of few rows have others, as many rows as it takes are computed.

Legend: N layers, R rows of a block, S slots, H key-value heads, P padded prompt length, L bucket
length, D head size, V vocabulary, K kept positions.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, UntypedStorage
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from rlpipe.base.errors import StoreError, UserError
from rlpipe.config.model import Dtype
from rlpipe.extras.local_engine.packed import Packed
from rlpipe.extras.local_engine.recorded import Graph, Recorded
from rlpipe.extras.local_engine.slot_attention import SlotCache, use_slot_attention
from rlpipe.models.causal import MODEL_FAULTS, empty_model, hf_config, small_windows
from rlpipe.models.checkpoint import Checkpoint, local_files, tensors_of, tied_names
from rlpipe.models.folder import folder_config
from rlpipe.models.linear import use_fast_linears
from rlpipe.models.masks import Masks
from rlpipe.models.storage import free, storages_of

PROMPT_STEP = 32
BUCKET_STEP = 64
BLOCK_TOKENS = 128
SLOT_TOKENS_MAX = 32768
SLOTS_MIN, SLOTS_MAX = 16, 128
ROW_STEP, LENGTH_STEP = 16, 64  # of the slots and of the length that a decode step computes
# steps in which a part must have the bits of the whole; of products in bfloat16 few elements differ
PROOFS, UNEQUAL = 3, -1
KEPT = 8  # logits rows per prompt: below 8 rows a product takes another code path
SCORE_ROWS = 32
HASHED_BYTES = 1 << 20  # of a tensor at a time: what stays in the processor's cache
PROVEN_PROMPT, PROVEN_TOKENS = 13, 24
DIFFERENCE_MAX = {"float32": 1e-3, "bfloat16": 0.3}  # of logprobs
# differ between folders of one architecture without changing what is computed
CONFIG_FREE = {"transformers_version", "_name_or_path", "dtype", "use_cache", "architectures",
               "bos_token_id", "eos_token_id", "pad_token_id"}  # fmt: skip


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def block_rows(padded: int) -> int:
    """The number of prompts that are computed together when padded to `padded` tokens."""
    return max(1, BLOCK_TOKENS // padded)


def slot_count(bucket: int, requests_max: int = SLOTS_MAX) -> int:
    """The number of slots that decode together in a bucket of `bucket` tokens: a power of two,
    enough for `requests_max` where so many fit.

    A step computes all of them where fewer have other bits, so there are no more than requests can
    come at once.
    """
    fit = 1 << max(1, SLOT_TOKENS_MAX // bucket).bit_length() - 1
    wanted = 1 << (requests_max - 1).bit_length()
    return max(SLOTS_MIN, min(SLOTS_MAX, fit, wanted))


@dataclass(frozen=True, eq=False)
class PrefixBlock:
    """Prompts computed together: their keys and values, and the logits after each."""

    prompts: list[tuple[int, ...]]
    kv_N2RHPD: Tensor
    logits_RV: Tensor

    @property
    def num_bytes(self) -> int:
        return self.kv_N2RHPD.nbytes + self.logits_RV.nbytes


class StepShape(NamedTuple):
    """What a decode step computes: products of so many rows, attention of the first ones among
    them, over so many keys.
    """

    rows: int
    used: int
    length: int


class LocalModel:
    """A causal language model in eval mode, and the folder that its weights came from.

    `dtype`: of weights, products, keys and values, whatever the folder's; logits become float32.
    """

    def __init__(self, folder: str, device: str, requests_max: int = SLOTS_MAX, dtype: Dtype = "float32") -> None:
        self.folder = folder
        self.requests_max = requests_max
        self._passes: dict[StepShape, Recorded] = {}
        # by the shape of all slots and of a part, and by the number of compared rows: how often the
        # part had the bits of a larger one
        self._parts: defaultdict[tuple[StepShape, StepShape], dict[int, int]] = defaultdict(dict)
        # by the number of slots: fewer rows whose products have other bits
        self._too_few: defaultdict[int, set[int]] = defaultdict(set)
        # memory that was freed, and its bytes
        self._sizes: list[tuple[UntypedStorage, int]] = []
        config = read_config(folder)
        text_config = config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.positions_max: int = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
        self.device = torch.device(device)
        # one product a token: in a product of all tokens of an expert, a token's
        # bits depend on how many there are
        self.lm: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), experts_implementation="batched_mm"
        )
        self.lm = self.lm.eval().requires_grad_(False)
        keep_dtypes(self.lm, tensors_of(empty_model(config)))
        use_fast_linears(self.lm)
        self._by_used_rows = use_slot_attention(self.lm)
        self.lm.to(self.device)
        self._packed = Packed(self.lm)
        self._load(folder)
        try:
            self.masks = Masks(self.lm)
            # transformers from 5.24 on warns at the old name
            self._cache_argument = (
                "cache" if "cache" in inspect.signature(self.lm.forward).parameters else "past_key_values"
            )
            self.kv_shape = self.prefill([(0,)], PROMPT_STEP).kv_N2RHPD.shape
            worst = self._difference()
        except (UserError, *MODEL_FAULTS) as error:
            raise self._refused(f"{error!s:.200}") from error
        if not worst <= DIFFERENCE_MAX[dtype]:  # a nan is not
            raise self._refused(f"its logprobs would be off by {worst:.2g}")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end tokens of generation_config.json, else of the config."""
        path = Path(self.folder) / "generation_config.json"
        saved = json.loads(path.read_text()) if path.is_file() else {}
        value = saved.get("eos_token_id", self.lm.config.get_text_config().eos_token_id)
        return () if value is None else tuple(value) if isinstance(value, list) else (value,)

    def _refused(self, why: str) -> UserError:
        return UserError(
            f"model_path={self.folder!r}: the local engine cannot serve a {self.lm.config.model_type} ({why}); use"
            " engines.kind='sglang'"
        )

    def _difference(self) -> float:
        """Mean |difference| between the logprobs of a request and those of the model's own forward
        pass of the same text.
        """
        tokens = tuple(index * 7919 % self.vocab_size for index in range(PROVEN_TOKENS))
        with small_windows(self.lm.config):
            own_LV = self.lm(input_ids=torch.tensor([tokens], device=self.device)).logits[0].float()
            block = self.prefill([tokens[:PROVEN_PROMPT]], PROMPT_STEP)
            kv_N2SHLD = self.empty_slots(SLOTS_MIN, BUCKET_STEP)
            kv_N2SHLD[:, :, :1, :, :PROMPT_STEP] = block.kv_N2RHPD[:, :, :1]
            logits, key_L = [block.logits_RV[0]], torch.arange(BUCKET_STEP, device=self.device)
            for position in range(PROVEN_PROMPT, PROVEN_TOKENS):
                tokens_S, position_S = (
                    torch.full((SLOTS_MIN,), value, device=self.device) for value in (tokens[position], position)
                )
                logits.append(self._decode(tokens_S, position_S, kv_N2SHLD, key_L)[0])
        given_LV = torch.stack(logits)
        return float((given_LV.log_softmax(-1) - own_LV[PROVEN_PROMPT - 1 :].log_softmax(-1)).abs().mean())

    def reload(self, folder: str) -> None:
        """Loads a folder's weights; UserError, with the old weights untouched, when they do not
        fit.
        """
        old, new = self.lm.config.to_dict(), read_config(folder).to_dict()
        differ = sorted(
            key for key in old.keys() | new.keys() if key not in CONFIG_FREE and old.get(key) != new.get(key)
        )
        if differ:
            raise UserError(f"{folder}: its config differs from the served model's in {differ}")
        self._load(folder)
        self.folder = folder

    @property
    def released(self) -> bool:
        """True when the model's weights are freed: only `resume` may be called then."""
        return bool(self._sizes)

    def release(self) -> None:
        """Frees the memory of its weights."""
        pieces = storages_of(tensors_of(self.lm).values())
        self._sizes = [(piece, piece.nbytes()) for piece in pieces]
        free(pieces)
        self._packed.drop()

    def resume(self) -> None:
        """Allocates the memory again, and reads the same weights from their folder."""
        for piece, size in self._sizes:
            piece.resize_(size)
        self._load(self.folder)
        self._sizes = []

    def _load(self, folder: str) -> None:
        # copies into the parameters that are there, so that memory stays flat over any number of
        # reloads; tied names are not repeated
        self.lm.load_state_dict(read_checkpoint(Path(folder), self.lm), strict=False)
        self._packed.take()
        for recorded in self._passes.values():
            recorded.weights_changed()

    def checksums(self) -> tuple[dict[str, str], str]:
        """The sha256 of every tensor that serves, by name, and one over all of them."""
        by_name = {name: _sha256(tensor) for name, tensor in sorted(tensors_of(self.lm).items())}
        return by_name, hashlib.sha256("".join(name + digest for name, digest in by_name.items()).encode()).hexdigest()

    def prefill(self, prompts: list[tuple[int, ...]], padded: int) -> PrefixBlock:
        """Keys, values and next-token logits of at most `block_rows(padded)` prompts, each
        right-padded to `padded`.
        """
        last = [len(prompt) - 1 for prompt in prompts]
        keep_K = torch.zeros(round_up(block_rows(padded), KEPT), dtype=torch.long, device=self.device)
        keep_K[: len(last)] = torch.tensor(last)
        logits_RKV, cache = self._block(prompts, padded, block_rows(padded), keep_K)
        rows = torch.arange(len(prompts), device=self.device)
        kv_N2RHPD = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
        return PrefixBlock(prompts, kv_N2RHPD, logits_RKV[rows, rows].float())

    def score(
        self, prompt: tuple[int, ...], start: int, top_k: int = 0
    ) -> tuple[list[float], list[list[tuple[float, int]]]]:
        """Logprobs (temperature 1) of prompt[start + 1:], each given what precedes it; and the
        logprobs of the `top_k` most probable tokens there, with these.

        A prompt is computed alone, not in a block of prompts.
        """
        logits_RPV, _ = self._block([prompt], round_up(len(prompt), PROMPT_STEP), 1, 0)
        scores: list[float] = []
        top: list[list[tuple[float, int]]] = []
        for first in range(0, len(prompt) - 1, SCORE_ROWS):
            rows = logits_RPV[0, first : first + SCORE_ROWS].double().log_softmax(-1)
            targets = torch.tensor(prompt[first + 1 : first + 1 + SCORE_ROWS], device=self.device)
            scores += rows[: len(targets)].gather(1, targets[:, None])[:, 0].tolist()
            if top_k:
                best = rows[: len(targets)].topk(min(top_k, rows.shape[-1]))
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                top += [list(zip(*pair, strict=True)) for pair in pairs]
        return scores[start:], top[start:]

    def _block(self, prompts: list[tuple[int, ...]], padded: int, rows: int, keep: Tensor | int) -> tuple[Tensor, Any]:
        assert 0 < len(prompts) <= rows and max(map(len, prompts)) <= padded, "a block larger than its shape"
        tokens_RP = torch.zeros(rows, padded, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_RP[row, : len(prompt)] = torch.tensor(prompt)
        position_P = torch.arange(padded, device=self.device)
        cache = DynamicCache()
        output = self.lm(
            input_ids=tokens_RP.to(self.device),
            attention_mask=self.masks.of(position_P.expand(rows, padded)[..., None], position_P),
            position_ids=position_P.expand(rows, padded),
            **{self._cache_argument: cache},
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits, cache

    def empty_slots(self, slots: int, bucket: int) -> Tensor:
        """Keys and values [N, 2, S, H, L, D] of empty slots."""
        layers, _, _, heads, _, head_size = self.kv_shape
        # zeros and not empty: a masked NaN still poisons a row, 0 * NaN = NaN
        return torch.zeros(layers, 2, slots, heads, bucket, head_size, dtype=self.lm.dtype, device=self.device)

    def decode(self, tokens_S: Tensor, position_S: Tensor, kv_N2SHLD: Tensor, used: int, length: int) -> Tensor:
        """Logits [rows, V] after one more token in each of the first slots, as many as there are
        tokens, whose key and value are written at `position_S`, below `length`. Only the first
        `used` of them have requests.

        The bits of these are those of a step with all slots.
        """
        slots, bucket = kv_N2SHLD.shape[2], kv_N2SHLD.shape[4]
        too_few = self._too_few[slots]
        rows = next((rows for rows in range(len(tokens_S), slots, ROW_STEP) if rows not in too_few), slots)
        parts = [StepShape(rows, used, length)] if self._by_used_rows else []
        shapes = [*parts, StepShape(rows, rows, length), StepShape(rows, rows, bucket), StepShape(slots, slots, bucket)]
        return self._smallest_proven(tokens_S, position_S, kv_N2SHLD, list(dict.fromkeys(shapes)), used)

    def _smallest_proven(
        self, tokens_S: Tensor, position_S: Tensor, kv_N2SHLD: Tensor, shapes: list[StepShape], used: int
    ) -> Tensor:
        """The logits by the first of these shapes that is proven; one that is not is computed
        beside them, and compared. The last shape needs no proof.
        """
        shape, *larger = shapes
        whole, proofs = shapes[-1], self._parts[shapes[-1], shape]
        seen = min(proofs.values(), default=0)  # UNEQUAL, if it ever was
        if seen != UNEQUAL:  # what was seen of more rows is so of fewer
            seen = max((count for compared, count in proofs.items() if compared >= used), default=0)
        if not larger or seen == PROOFS:
            return self._step(tokens_S, position_S, kv_N2SHLD, shape)
        # the part first: what the larger one writes stays
        try:
            own_SV = None if seen == UNEQUAL else self._step(tokens_S, position_S, kv_N2SHLD, shape)
        except MODEL_FAULTS:  # code that needs the keys of all rows
            own_SV, proofs[used] = None, UNEQUAL
        proven_SV = self._smallest_proven(tokens_S, position_S, kv_N2SHLD, larger, used)
        if own_SV is not None and not proven_SV[:used].isnan().any():  # which would equal nothing
            proofs[used] = seen + 1 if torch.equal(own_SV[:used], proven_SV[:used]) else UNEQUAL
            if proofs[used] == UNEQUAL and shape == (shape.rows, shape.rows, whole.length):
                self._too_few[whole.rows].add(shape.rows)
        return proven_SV

    def _step(self, tokens_S: Tensor, position_S: Tensor, kv_N2SHLD: Tensor, shape: StepShape) -> Tensor:
        rows = len(tokens_S)
        tokens_S, position_S = (functional.pad(given, (0, shape.rows - rows)) for given in (tokens_S, position_S))
        if shape not in self._passes:
            self._passes[shape] = Recorded(self._decode, self._graph_of_others(shape))
        kv_N2UHLD = kv_N2SHLD[:, :, : shape.used, :, : shape.length]
        key_L = torch.arange(shape.length, device=self.device)
        return self._passes[shape](tokens_S, position_S, kv_N2UHLD, key_L)[:rows]

    def _graph_of_others(self, shape: StepShape) -> Graph | None:
        """A graph that may serve this shape, too: of as many rows, else of a step that has free
        rows if this one has. None where there is none.
        """
        proven = {known: made.graph for known, made in self._passes.items() if made.proven}
        same_rows = [graph for known, graph in proven.items() if known[:2] == shape[:2]]
        others = [graph for known, graph in proven.items() if (known.used == known.rows) == (shape.used == shape.rows)]
        return next(iter([*same_rows, *others]), None)

    def _decode(self, tokens_S: Tensor, position_S: Tensor, kv_N2UHLD: Tensor, key_L: Tensor) -> Tensor:
        cache = SlotCache(kv_N2UHLD, position_S)
        output = self.lm(
            input_ids=tokens_S[:, None],
            attention_mask=self.masks.of(cache.position_U[:, None, None], key_L),
            position_ids=position_S[:, None],
            **{self._cache_argument: cache},
            use_cache=True,
        )
        return output.logits[:, 0].float()


def keep_dtypes(lm: Any, saved: dict[str, Tensor]) -> None:
    """Gives the buffers that are saved with the weights (biases of routers) their own dtypes, which
    the trainer does not round either.
    """
    for name, buffer in list(lm.named_buffers()):
        if name in saved:
            module, _, own = name.rpartition(".")
            setattr(lm.get_submodule(module), own, buffer.to(saved[name].dtype))


def _sha256(tensor: Tensor) -> str:
    """The sha256 of a tensor's bytes.

    Taken of copies of pieces, as memory that numpy has used can never be freed.
    """
    digest = hashlib.sha256()
    for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(HASHED_BYTES):
        digest.update(piece.cpu().clone().numpy().data)
    return digest.hexdigest()


def read_config(folder: str) -> PretrainedConfig:
    """The config of a folder in HF format; UserError when it has none of a known type."""
    try:
        return hf_config(folder_config(Path(folder)))
    except UserError as error:
        raise UserError(f"model_path={folder!r:.200}: {error}") from error


def read_checkpoint(folder: Path, lm: Any) -> dict[str, Tensor]:
    """All tensors of a folder, by the names of `lm`; UserError naming those that are damaged,
    missing, unknown or of another shape.
    """
    try:
        checkpoint = Checkpoint(str(folder), local_files(folder), lm)
        if faults := checkpoint.faults():
            raise UserError(f"{folder}: {len(faults)} of its tensors are not the model's: {'; '.join(faults[:3])}")
        tensors = {name: checkpoint.read(name) for name in tensors_of(lm)}
        # a tied tensor may be stored twice, but not with two values
        for alias, name in tied_names(lm).items():
            if alias in checkpoint.shapes and not torch.equal(checkpoint.read(alias), tensors[name]):
                raise UserError(f"{folder}: {alias} and {name} differ, but the model ties them")
    except (StoreError, SafetensorError, OSError) as error:
        raise UserError(f"{folder} is torn or unreadable: {error}") from error
    for name, tensor in tensors.items():
        # aminmax allocates nothing of the tensor's size, and propagates NaN
        edges = tensor.aminmax() if tensor.is_floating_point() and tensor.numel() else ()
        if not tensor.is_floating_point() or not all(math.isfinite(edge.item()) for edge in edges):
            raise UserError(f"{folder}: {name} holds values that are not finite floating-point numbers")
    return tensors
