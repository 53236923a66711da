"""The policy as a sharded module that maps packed tokens to logprobs, and the loading of its
weights.

Legend: R rows, L tokens of a row, N scored positions, H hidden size.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from rlpipe.algorithms.logprobs import LOGITS_KEPT, Beside, chunk_size, chunked_logprobs
from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.references import ArtifactRef, FileRecord
from rlpipe.base.values import JsonDict
from rlpipe.models.adapter import is_adapter, new_adapter_rows, put_adapter
from rlpipe.models.branched import uses_branched
from rlpipe.models.causal import ExpertUse, empty_model, head_of, hf_config, hidden_states, restore_buffers, takes
from rlpipe.models.checkpoint import Checkpoint, TensorFile, finite, local_files, ranged_file, tensors_of, tied_names
from rlpipe.models.context_parallel import ContextGroup, use_context_group, uses_context_group
from rlpipe.models.flex import own_attention, uses_flex
from rlpipe.models.fused import as_written
from rlpipe.models.linear import use_fast_linears
from rlpipe.models.masks import AttentionMask, Masks
from rlpipe.store.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, Adapted, adapter_of
from rlpipe.store.artifacts import Blocks, check_file, read_manifest, read_range
from rlpipe.store.local_copy import materialise
from rlpipe.store.policy_files import AdapterPolicy, stored_policy
from rlpipe.trainer.jobs import NewAdapter
from rlpipe.trainer.packing import BRANCHES
from rlpipe.trainer.ranks import Ranks

# (tensor's name in the module, whole shape, first row, end row) -> those rows
ReadRows = Callable[[str, list[int], int, int], Tensor]
# gives, for a model without weights, the function that reads its rows
Weights = Callable[[Any], ReadRows]


class PolicyModel(nn.Module):
    """A causal language model whose forward pass returns logprobs, so that FSDP unshards lm_head
    within the forward pass.
    """

    def __init__(self, lm: Any, adapted: Adapted | None = None, context: ContextGroup | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.context = context  # the context-parallel group; None without one
        self.adapted = adapted  # the adapter's settings and base; None without an adapter
        vocab_size = lm.config.get_text_config().vocab_size
        self.chunk, self.kept = chunk_size(vocab_size), chunk_size(vocab_size, LOGITS_KEPT)
        self._project = head_of(lm)
        self.experts = ExpertUse(lm)

    def forward(
        self,
        tokens_RL: Tensor,
        positions_RL: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature: float,
        entropy_trained: bool = True,
        branch_RL: Tensor | None = None,
        beside: Beside | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns logprobs and entropies of `target_N`, fp32, each predicted at the flat position
        `source_N`, and what is computed `beside` (not in a context-parallel group). All ranks of a
        context-parallel group pass the same arguments and get the same result.
        """
        context, length, count, place_M = (
            self.context if uses_context_group(self.lm) else None,
            tokens_RL.shape[1],
            len(target_N),
            None,
        )
        assert beside is None or context is None, "a rank has the logits of its own slices only"
        if context:
            tokens_RL, positions_RL, branch_RL = context.filled(tokens_RL, positions_RL, branch_RL)
        mask = self._mask(positions_RL, branch_RL, context)
        if context:
            own = context.slice(tokens_RL, positions_RL, source_N, target_N, length)
            tokens_RL, positions_RL, place_M = own.tokens_RS, own.positions_RS, own.place_M
            source_N, target_N = own.source_M, own.target_M
        with self.experts.counting(source_N):
            hidden_NH = hidden_states(self.lm, tokens_RL, positions_RL, mask).flatten(0, 1).index_select(0, source_N)
        how = {"temperature": temperature, "chunk": self.chunk, "kept": self.kept, "entropy_trained": entropy_trained}
        parts = chunked_logprobs(hidden_NH, target_N, self._project, **how, beside=beside)
        return parts if context is None or place_M is None else context.joined(parts[0], parts[1], place_M, count)

    def _mask(
        self, positions_RL: Tensor, branch_RL: Tensor | None, context: ContextGroup | None
    ) -> AttentionMask | None:
        """The attention mask to pass to the model; None where the model makes its own, or needs
        none. A model that has only a slice of each row cannot make the mask of whole rows.
        """
        makes_own = not (uses_flex(self.lm) or uses_branched(self.lm))
        if branch_RL is None and not context and makes_own:
            return None
        masks = Masks(self.lm)
        if branch_RL is None and makes_own and masks.whole and context and context.is_single(positions_RL):
            return None  # the causal kernel needs none
        return masks.of_rows(positions_RL, branch_RL, BRANCHES)

    def plain_logprobs(self, tokens_L: Tensor) -> Tensor:
        """Logprobs of `tokens_L` without the first token, computed by the language model's own code
        for this text alone: `forward` must give the same.
        """
        given = {"use_cache": False} if takes(self.lm, "use_cache") else {}
        with own_attention(self.lm), as_written():
            logits_LV = self.lm(input_ids=tokens_L[None], **given).logits[0, :-1].float()
        return torch.log_softmax(logits_LV, dim=-1).gather(-1, tokens_L[1:, None]).squeeze(-1)

    def shards(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields (name in the language model, parameter, which `own_rows` takes); a tied parameter
        once.
        """
        for name, parameter in self.named_parameters():
            yield name.removeprefix("lm."), parameter

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The entries of `shards` that have a gradient. Some families have parameters without a
        gradient (biases of experts); in a model with an adapter only the adapter has gradients.
        """
        return ((name, parameter) for name, parameter in self.shards() if parameter.requires_grad)

    def kept_buffers(self) -> dict[str, Tensor]:
        """The buffers that are saved with the parameters but not trained (biases that balance
        experts). Not sharded: every rank has all of them.
        """
        parameters = dict(self.lm.named_parameters())
        return {name: tensor for name, tensor in tensors_of(self.lm).items() if name not in parameters}


def own_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a parameter, or of its gradient: all of them where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved_as(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is saved: for a parameter that of the forward pass, for a buffer
    its own, with which the model computes.
    """
    return dtype if isinstance(tensor, nn.Parameter) else tensor.dtype


def whole_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """All rows of a parameter or a buffer, as `saved_as`. A collective for a sharded one."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to(saved_as(tensor, dtype))


def reshard(policy: PolicyModel) -> None:
    """Frees the parameters that a forward pass without a backward pass gathered; the next optimizer
    step would make them stale.
    """
    if isinstance(policy, FSDPModule):
        policy.reshard()


def row_range(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of dimension 0 that FSDP2 places on a rank, as (first, end): equal chunks, the last
    ones shorter or empty.
    """
    chunk = -(-rows // size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def build_policy(
    ranks: Ranks, config: PretrainedConfig, weights: Weights, frozen: bool = False, adapted: Adapted | None = None
) -> PolicyModel:
    """Builds the policy with fp32 master weights, sharded by FSDP; each rank reads only its own
    rows. One rank that computes in fp32 as well has nothing to gather or to cast: without FSDP,
    which would copy every weight and gradient, it computes the same bits.

    A `frozen` model, and the base of an adapter, is kept in the dtype of the forward pass, which
    gives the same bits. A fault while reading is raised on all ranks.
    """
    lm: Any = None
    read_rows: ReadRows | None = None
    with ranks.together():
        lm = empty_model(config)
        if odd := [name for name, parameter in lm.named_parameters() if parameter.ndim == 0]:
            raise UserError(
                f"model config: {config.model_type} has parameters without a dimension ({odd[:3]}): they cannot be"
                " sharded"
            )
        read_rows = weights(lm)
        if ranks.context is not None:
            use_context_group(lm, ranks.context)
        # after `read_rows`: the files have the names of the model without it
        if adapted is not None:
            put_adapter(lm, adapted.settings)
        use_fast_linears(lm)
    assert read_rows is not None, "an error is raised"
    policy, dtype = PolicyModel(lm, adapted, ranks.context), getattr(torch, ranks.options.dtype)
    if frozen:
        policy.requires_grad_(False)
    for parameter in policy.parameters() if frozen or adapted else []:
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    layers = layers_of(lm)
    for layer in layers if ranks.options.trainer.activation_checkpointing else []:
        recompute(layer)
    if ranks.size > 1 or dtype is not torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in (*layers, policy):
            fully_shard(module, mesh=ranks.mesh, mp_policy=precision)
        register_fsdp_forward_method(policy, "plain_logprobs")
        policy.to_empty(device=ranks.device)
    else:
        give_memory(policy, ranks.device)
    with ranks.together(), torch.no_grad():
        restore_buffers(lm)
        fill(ranks, policy.shards(), [own_rows(parameter) for _, parameter in policy.shards()], read_rows)
        for name, buffer in policy.kept_buffers().items():
            buffer.copy_(read_rows(name, [*buffer.shape], 0, len(buffer) if buffer.ndim else 1))
    return policy


def give_memory(policy: PolicyModel, device: torch.device) -> None:
    """Replaces the tensors of the meta device by empty ones. A parameter that stands at several
    places stays one, which torch's `to_empty` keeps only where FSDP has sharded it.
    """
    made: dict[Tensor, Tensor] = {}
    for module in policy.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, made.setdefault(buffer, torch.empty_like(buffer, device=device)))


def layers_of(lm: Any) -> list[nn.Module]:
    """The layers that FSDP shards, and so gathers, one by one; all other parameters are gathered
    together.
    """
    layers = [module for module in lm.modules() if type(module).__name__ in (lm._no_split_modules or ())]
    # a family may name a layer and a module inside it
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    # they are sharded with the whole model
    tied = {id(lm.get_parameter(name)) for name in tied_names(lm)}
    return [layer for layer in layers if id(layer) not in inner and not tied.intersection(map(id, layer.parameters()))]


def recompute(layer: nn.Module) -> None:
    """Turns on activation checkpointing: the backward pass recomputes the layer's activations from
    its input.
    """
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def fill(
    ranks: Ranks, parameters: Iterable[tuple[str, nn.Parameter]], tensors: Iterable[Tensor], read_rows: ReadRows
) -> None:
    """Reads this rank's rows of parameters, or of a moment of each, into `tensors`."""
    for (name, parameter), tensor in zip(parameters, tensors, strict=True):
        start, end = row_range(parameter.shape[0], ranks.part, ranks.parts)
        assert tensor.shape[0] == end - start, f"{name}: this rank has {tensor.shape[0]} rows, not {start} to {end}"
        tensor.copy_(read_rows(name, [*parameter.shape], start, end))


def new_weights(config: PretrainedConfig, seed: int, lm: Any) -> ReadRows:
    """Returns the function that gives rows of a newly initialised model: the same for any number of
    ranks.

    UserError when the machine has too little memory for it.
    """
    here, needed = psutil.virtual_memory().total, 4 * sum(parameter.numel() for parameter in lm.parameters())
    if needed > here:
        raise UserError(
            f"model config: new weights of this shape take {needed / 2**30:,.0f} GiB, this machine has"
            f" {here / 2**30:,.0f} GiB"
        )
    torch.manual_seed(seed)
    tensors = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    return lambda name, shape, start, end: tensors[name][start:end] if shape else tensors[name]


def load_policy(
    ranks: Ranks, ref: ArtifactRef, frozen: bool = False, new: NewAdapter | None = None
) -> tuple[PolicyModel, PretrainedConfig, JsonDict]:
    """Loads a policy from the store; returns it, its config and its generation config. `frozen`:
    see `build_policy`. `new`: the adapter to add to a policy without one.
    """
    adapted, weights = Adapted(new.settings, ref) if new else None, None
    rebuilt = _rebuilt(ranks, ref)
    with ranks.together():
        stored = stored_policy(ranks.store, ref)
        named = "config.json", "generation_config.json", ADAPTER_CONFIG
        documents = {name: json.loads(stored.read(name)) for name in named if name in stored.files}
        if "config.json" not in documents:
            raise StoreError(f"{ref.folder} has no config.json")
        config = hf_config(documents["config.json"])
        if isinstance(stored, AdapterPolicy):
            settings = adapter_of(f"{ref.folder}/{ADAPTER_CONFIG}", documents.get(ADAPTER_CONFIG, {}))
            adapted = Adapted(settings, stored.base)
            weights = with_adapter(whole_weights(ranks, stored.base), adapter_rows(ranks, ref))
        else:
            weights = whole_weights(ranks, ref, rebuilt)
            weights = with_adapter(weights, functools.partial(new_adapter_rows, new.seed)) if new else weights
    assert weights is not None, "an error is raised"
    generation_config = (
        documents.get("generation_config.json") or GenerationConfig.from_model_config(config).to_diff_dict()
    )
    policy = build_policy(ranks, config, weights, frozen, adapted)
    if rebuilt is not None:
        # all ranks have read it; another rank of this node may delete it first
        shutil.rmtree(rebuilt, ignore_errors=True)
    return policy, config, generation_config


def _rebuilt(ranks: Ranks, ref: ArtifactRef) -> Path | None:
    """The folder on this node's disk with the whole, verified files of a policy that is stored as a
    delta; None for a policy that is stored whole.
    """
    folder: Path | None = None
    for is_turn in (
        os.environ.get("LOCAL_RANK", "0") == "0",
        True,
    ):  # one rank of a node writes them, then the other ranks find them
        with ranks.together():
            if is_turn and stored_policy(ranks.store, ref).is_rebuilt:
                folder = materialise(ranks.store, ref, ranks.scratch("policies"))
    return folder


def whole_weights(ranks: Ranks, ref: ArtifactRef, rebuilt: Path | None = None) -> Weights:
    """Returns the function that reads the weights of a whole policy, from the store or from the
    folder `rebuilt`. A collective: the ranks share the hashing of the policy's files.
    """
    files = [file for name, file in stored_policy(ranks.store, ref).files.items() if name.endswith(".safetensors")]
    if rebuilt is None:
        check_share(ranks, ref.folder, files)

    def rows(lm: Any) -> ReadRows:
        in_store = (stored_file(ranks, ref.folder, file) for file in files)
        checkpoint = Checkpoint(ref.folder, local_files(rebuilt) if rebuilt else [*in_store], lm)
        # before memory is allocated for the shapes of config.json
        if faults := checkpoint.faults():
            raise StoreError(f"{ref.folder}: {'; '.join(faults[:3])}")
        return checkpoint.rows

    return rows


def adapter_rows(ranks: Ranks, ref: ArtifactRef) -> ReadRows:
    """Returns the function that reads the matrices of a stored adapter, fp32. A collective, as
    `whole_weights`.
    """
    record = read_manifest(ranks.store, ref.folder, ref.sha256).file(ADAPTER_WEIGHTS)
    check_share(ranks, ref.folder, [record])
    file = stored_file(ranks, ref.folder, record)

    def rows(name: str, shape: list[int], start: int, end: int) -> Tensor:
        if file.shapes.get(PREFIX + name) != shape:
            raise StoreError(
                f"{ref.folder}: the adapter has {name} in the shape {file.shapes.get(PREFIX + name)}, not {shape}"
            )
        return finite(file.read(PREFIX + name, (start, end)).float(), PREFIX + name, ref.folder)

    return rows


def with_adapter(weights: Weights, of_adapter: ReadRows) -> Weights:
    """Returns the function that reads the weights of a model with an adapter: those of the base by
    `weights`, the adapter's by `of_adapter`.
    """

    def rows(lm: Any) -> ReadRows:
        of_base = weights(lm)
        return lambda name, shape, start, end: (of_adapter if is_adapter(name) else of_base)(name, shape, start, end)

    return rows


def check_share(ranks: Ranks, folder: str, files: list[FileRecord]) -> None:
    """Hashes files without known blocks whole, each on one rank, so that all ranks together read
    each file once. StoreError for a file that is not what its record says.
    """
    for file in files[ranks.rank :: ranks.size]:
        check_file(ranks.store, folder, file)


def stored_file(ranks: Ranks, folder: str, file: FileRecord, blocks: Blocks | None = None) -> TensorFile:
    """A file of weights in the store that is read in parts (range requests), each verified by
    `blocks`.
    """
    read = functools.partial(read_range, ranks.store, folder, file, blocks)
    return ranged_file(ranks.store.address(f"{folder}/{file.name}"), file.bytes, read)
