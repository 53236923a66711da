"""The files of a LoRA adapter, in the format of the library peft, and the whole policy that it
belongs to. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from rlpipe.base.errors import StoreError
from rlpipe.base.references import ArtifactRef

ADAPTER_WEIGHTS, ADAPTER_CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
PREFIX = "base_model.model."  # before the name of a tensor in peft's files


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: two matrices A and B beside each of many linear layers. A target layer
    computes `W x + (alpha / rank) B A x`.

    `targets`: names of layers, or their ends; empty: all linear layers but the head. Example:
    Adapter(8, 16.0, ("q_proj", "v_proj"))
    """

    rank: Annotated[int, Field(ge=1)]
    alpha: Annotated[float, Field(gt=0)]
    targets: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapted:
    """The settings of a policy's adapter, and the whole policy in the store that it is added to.

    That whole policy never changes.
    """

    settings: Adapter
    base: ArtifactRef


ADAPTER, ADAPTED = TypeAdapter(Adapter), TypeAdapter(Adapted)


@dataclass(frozen=True)
class AdapterBase:
    """The content of `base.json`: `policy` is the whole policy that an adapter is added to."""

    policy: ArtifactRef
    schema_version: Literal[1] = 1  # of another, the document is refused


@dataclass(frozen=True)
class _PeftDocument:
    """The fields of peft's adapter_config.json that change what an adapter computes, as far as
    rlpipe knows values other than their defaults.
    """

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1)]
    lora_alpha: Annotated[float, Field(gt=0)]
    target_modules: Annotated[list[str], Field(min_length=1)]
    bias: Literal["none"] = "none"
    fan_in_fan_out: Literal[False] = False
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    # peft and engines compute by these fields, the trainer does not: rlpipe's adapters have none
    rank_pattern: Annotated[dict[str, int] | None, Field(max_length=0)] = None
    alpha_pattern: Annotated[dict[str, float] | None, Field(max_length=0)] = None
    modules_to_save: Annotated[list[str] | None, Field(max_length=0)] = None
    layers_to_transform: None = None
    layer_replication: None = None
    exclude_modules: None = None
    target_parameters: Annotated[list[str] | None, Field(max_length=0)] = None
    lora_bias: Literal[False] = False
    use_qalora: Literal[False] = False


PEFT_DOCUMENT = TypeAdapter(_PeftDocument)
WRITTEN = {"peft_type", "r", "lora_alpha", "target_modules", "bias", "fan_in_fan_out", "use_rslora", "use_dora"}


def config_document(adapter: Adapter, targets: list[str]) -> dict[str, object]:
    """The content of peft's adapter_config.json, for an adapter beside the layers that `targets`
    name.
    """
    beside = {"task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True, "lora_dropout": 0.0}
    named = _PeftDocument("LORA", adapter.rank, adapter.alpha, targets)
    computed = PEFT_DOCUMENT.dump_python(named, include=WRITTEN)  # the others are peft's defaults
    return beside | computed | {"lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha}


def adapter_of(where: str, document: object) -> Adapter:
    """The adapter that an adapter_config.json describes; StoreError naming the field by which it is
    an adapter of another kind.
    """
    try:
        config = PEFT_DOCUMENT.validate_python(document)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        raise StoreError(f"{where}: {name}={fault['input']!r:.80}: {fault['msg']:.200}") from error
    return Adapter(config.r, config.lora_alpha, tuple(config.target_modules))
