"""How a gang is started. Imports no torch: the flow process builds the command line from it."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass

from rlpipe.services import KEY_VARIABLE, LOOPBACK, service_key
from rlpipe.types import UserError

RESTARTS_MAX = 0  # torchrun's own restart was seen to hang; who started the gang starts it again, within one budget


@dataclass(frozen=True)
class TrainerOptions:
    """One gang. Example: TrainerOptions(store="file:///data/store", host="127.0.0.1", port=8123, work_dir="/tmp/gang")."""

    store: str
    host: str
    port: int
    work_dir: str  # scratch on local disk, shared by the ranks of a node
    tokens_max: int = 4096  # of a microbatch, per rank
    threads: int = 1  # per rank
    dtype: str = "float32"
    device: str = "cpu"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.token:
            raise UserError(f"trainer host={self.host}: set {KEY_VARIABLE}, or listen on 127.0.0.1")

    @property
    def token(self) -> str:
        """The bearer token, from the environment: never on a command line, never in a config. Empty: none is asked for."""
        return service_key()

    def as_argument(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_argument(cls, text: str) -> TrainerOptions:
        return cls(**json.loads(text))


def torchrun_argv(options: TrainerOptions, ranks: int, *, nodes: int = 1, node: int = 0, rendezvous: str = "") -> list[str]:
    """The command of one node's part of a gang of `ranks` per node. Several nodes meet at node 0's rendezvous, host:port."""
    assert ranks >= 1 and 0 <= node < nodes, f"ranks={ranks}, node {node} of {nodes}"
    launch = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--max-restarts", str(RESTARTS_MAX)]
    launch += ["--monitor-interval", "0.5"]
    # static: the ranks of node 0 are the first ones, and rank 0 is the one that answers
    host, port = rendezvous.rsplit(":", 1) if nodes > 1 else (LOOPBACK[0], "0")
    launch += ["--node-rank", str(node), "--master-addr", host, "--master-port", port]
    return [sys.executable, "-m", "rlpipe.trainer.agent", *launch, "-m", "rlpipe.trainer.server", options.as_argument()]
