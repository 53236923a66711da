"""The messages between trainer and engine hosts when weights are sent from the trainer's memory to
engines (`engines.transport = "tensor"`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sender:
    """A trainer that has a policy in memory.

    `url`: of the trainer; `position`: that must still be resident; `key`: its bearer key, empty if
    the trainer is a service of the run, whose record has the key.
    """

    url: str
    position: str
    key: str = ""


@dataclass(frozen=True)
class TensorBucket:
    """Tensors that are sent together, by their names in a hub's files.

    `dtypes`: by torch's names. Example: TensorBucket(["lm_head.weight"], ["bfloat16"], [[512, 64]])
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True)
class Offer:
    """The address at which the receivers of a policy meet its sender, and the tensors that it will
    send, in order.
    """

    address: str
    port: int
    buckets: list[TensorBucket]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of all tensors, by name."""
        return {name: shape for bucket in self.buckets for name, shape in zip(bucket.names, bucket.shapes, strict=True)}


@dataclass(frozen=True)
class Group:
    """A process group of torch that a sender and its receivers create for one policy, and destroy
    afterwards.

    `size`: the number of ranks; the sender is rank 0.
    """

    name: str
    address: str
    port: int
    size: int
    backend: str
