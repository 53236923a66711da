"""Nodes of a network on one machine: a network namespace each, joined by a bridge.

Where those cannot be made: addresses of loopback.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.deadlines import DEADLINE_S

NET = "10.9.8"
# of a throttled cable: more than the largest piece that the kernel hands over
BURST_BYTES = 256 * 1024


@dataclass(frozen=True)
class Node:
    """`inside` goes before a command that is to run on the node; who is
    elsewhere reaches it at `address`.

    `ends`: of its cable, each a command's beginning and the device there; what is sent at the first
    end goes to the node. None on loopback.
    """

    inside: tuple[str, ...]
    address: str
    ends: tuple[tuple[tuple[str, ...], str], ...] = ()

    def throttle(self, bytes_per_s: float) -> None:
        """Its cable carries so much, both ways; 0: as much as the machine can."""
        assert self.ends, "loopback has no cable"
        rate = f"tbf rate {8 * bytes_per_s:.0f}bit burst {max(BURST_BYTES, bytes_per_s / 100):.0f} latency 50ms"
        for inside, device in self.ends:
            subprocess.run([*inside, "tc", "qdisc", "del", "dev", device, "root"], check=False, capture_output=True)
            if bytes_per_s:
                subprocess.run([*inside, "tc", "qdisc", "add", "dev", device, "root", *rate.split()], check=True)


def unavailable() -> str:
    """Why no network can be made on this machine; empty: it can."""
    try:
        with _namespace() as first, _namespace() as second:
            _join(first, second, 1)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {error}"
    return ""


@contextlib.contextmanager
def network(*names: str) -> Iterator[dict[str, Node]]:
    """The nodes by name. What runs on them is the caller's to end."""
    if unavailable():
        yield {name: Node((), f"127.0.1.{index}") for index, name in enumerate(names, 1)}
        return
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace())
        nodes = {}
        for index, name in enumerate(names, 1):
            holder = stack.enter_context(_namespace())
            _join(switch, holder, index)
            ends = (_inside(switch), f"port{index}"), (_inside(holder), "eth0")
            nodes[name] = Node(_inside(holder), f"{NET}.{index}", ends)
        yield nodes


def _inside(holder: int) -> tuple[str, ...]:
    return ("nsenter", f"--target={holder}", "--net")


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """The pid of a process that holds a new namespace, with a bridge that nothing is joined to."""
    setup = "ip link set lo up && ip link add bridge type bridge && ip link set bridge up && echo ready && read -r _"
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise OSError("unshare --net, or ip link add type bridge, was refused")
        yield holder.pid
    finally:
        holder.communicate("\n", timeout=DEADLINE_S)


def _join(switch: int, holder: int, index: int) -> None:
    """A cable from the holder's namespace to the switch's bridge."""
    port = f"port{index}"
    plug = (
        f"ip link add {port} type veth peer name eth0 netns {holder} && ip link set {port} master bridge && "
        f"ip link set {port} up"
    )
    address = f"ip addr add {NET}.{index}/24 dev eth0 && ip link set eth0 up"
    for namespace, command in ((switch, plug), (holder, address)):
        subprocess.run([*_inside(namespace), "sh", "-c", command], check=True, capture_output=True)
