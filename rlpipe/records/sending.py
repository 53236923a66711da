"""The messages that both sides send when weights travel from the trainer's memory to engines
(`engines.transport = "tensor"`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sender:
    """A gang that holds a policy.

    `url`: where it answers; `position`: what it has to hold still; `key`: its bearer key, empty
    where the gang is a service of the run, whose record has it.
    """

    url: str
    position: str
    key: str = ""


@dataclass(frozen=True)
class TensorBucket:
    """Tensors that are sent together, under the names of a hub's files.

    `dtypes`: as torch has them. Example: TensorBucket(["lm_head.weight"], ["bfloat16"], [[512,
    64]])
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True)
class Offer:
    """The address where the receivers of a policy meet its sender, and what it will send, in this
    order."""

    address: str
    port: int
    buckets: list[TensorBucket]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of all tensors, by name."""
        return {name: shape for bucket in self.buckets for name, shape in zip(bucket.names, bucket.shapes, strict=True)}


@dataclass(frozen=True)
class Group:
    """A group of torch's that a sender and its receivers make for one policy, and end behind it.

    `size`: of all its ranks; the sender's is 0.
    """

    name: str
    address: str
    port: int
    size: int
    backend: str
