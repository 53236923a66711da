"""A policy on its way from the trainer's nodes to three other nodes at once, beside a raw copy of
the same bytes from one node to all three.

    .venv/bin/python benchmarks/fetching.py FOLDER [--gb 2] [--files 1 4] [--trainers 1 2]
        [--gbit-per-s 1 10] [--tries 3]

As root: network namespaces are the nodes, every one with a cable that carries what `--gbit-per-s`
says. The trainer's HTTP server, the hosts, what they ask one another and how they verify are
rlpipe's own; no model is trained, and no engine is started: the policy is random bytes in so many
files. Printed are seconds from the moment at which the hosts are told of the policy until the last
of them has it, verified, and the raw copy.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from aiohttp import web

from benchmarks.weights_world import copier
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.config.source import read_config
from rlpipe.engines.fleet import Fleet
from rlpipe.engines.remote import HostService, RemoteHost
from rlpipe.engines.weights import Probe
from rlpipe.processes.launch import free_port
from rlpipe.services.calls import new_session
from rlpipe.services.finder import Peer
from rlpipe.services.registration import ENGINES, KEY_VARIABLE, TRAINER, Registration, ServiceRecord
from rlpipe.store.artifacts import Blocks
from rlpipe.store.backend import open_store
from rlpipe.store.documents import sealed
from rlpipe.store.nearby import Nearby, NodeDisk
from rlpipe.store.transfer import PART_BYTES
from rlpipe.trainer.node_server import NodeServer
from rlpipe.trainer.process import TrainerOptions
from rlpipe.trainer.publishing import BEGIN_S, Uploads, published_in_blocks
from tests.network_world import Node, network, unavailable

PRESETS = Path(__file__).parent.parent / "flows/presets"
POLICY, MOMENT, KEY = "runs/a/rl/00000/policy", "2026-03-04T05:06:07.000+00:00", "the key of the nodes"
HOSTS = ("host-a", "host-b", "host-c")
TRAINERS = ("trainer", "trainer-1", "trainer-2", "trainer-3")
Seconds = dict[float, dict[str, list[float]]]  # by the speed of the cables, and by what was brought
PIECE_BYTES = 1 << 24
ELSEWHERE = "/nobody/has/this/folder"


def record_of(name: str, url: str) -> ServiceRecord:
    return ServiceRecord(name, url, "local", start=name)


def trainer(name: str, address: str, port: int, folder: Path) -> None:
    """Serves what lies in the folder `published`, as each node of a trainer does."""
    options = TrainerOptions(store=f"file://{folder}/store", run="a", host=address, port=port, work_dir=str(folder))
    os.environ[KEY_VARIABLE] = record_of(name, "").key
    server = NodeServer(options, Uploads(open_store(options.store), folder / "published", BEGIN_S))
    print("ready", flush=True)
    asyncio.run(server.serve())


async def host(name: str, address: str, port: int, folder: Path) -> None:
    """A host that fetches what it is told to serve, prints when it has it, and deletes it."""
    os.chdir(folder)
    config = read_config("tiny", ["run=a", f"store={folder}/store", "tracking.uri="], PRESETS)
    service = HostService(open_store(config.store), config, name, address, port)
    service.key = record_of(name, "").key
    (service.host.work_dir / "weights").mkdir(parents=True)

    async def fetch(policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None = None) -> None:
        try:
            await asyncio.to_thread(service.host._fetch, policy, version, probe, nearby)
            print(time.time(), flush=True)
        except Exception as error:
            print(repr(error), flush=True)
        shutil.rmtree(service.host.work_dir / "weights")

    service.host.serve = fetch
    runner = web.AppRunner(service.app())
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    print("ready", flush=True)
    await asyncio.sleep(3600)


def started(node: Node, *arguments: object) -> subprocess.Popen[str]:
    command = [*node.inside, sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def published(folder: Path, num_bytes: int, num_files: int, attempt: str) -> tuple[ArtifactRef, str, dict[str, Blocks]]:
    """A policy of random bytes below `folder`, its manifest, and the
    hashes of the parts of its files of weights."""
    records, parts = [], {}
    names = [f"model-{index:05d}.safetensors" for index in range(num_files)]
    for name, size in {"config.json": 0, **dict.fromkeys(names, num_bytes // num_files)}.items():
        path = folder / POLICY / attempt / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(b"" if size else b"{}")
            for at in range(0, size, PIECE_BYTES):
                file.write(os.urandom(min(PIECE_BYTES, size - at)))
        record, blocks = published_in_blocks(path, PART_BYTES)
        records.append(record)
        parts |= {record.name: blocks} if size else {}
    manifest = sealed(Manifest("a", "rl", 0, "policy", {}, "0", {}, records, {}, 1, "x", MOMENT, MOMENT))
    return ArtifactRef(POLICY, hashlib.sha256(manifest).hexdigest()), manifest.decode(), parts


def shared(
    folder: Path, weights: Iterable[str], trainers: list[str], urls: dict[str, str]
) -> tuple[list[NodeDisk], dict[str, int]]:
    """The files as so many nodes of a trainer have made them: places, and which has which."""
    made_on = {name: index % len(trainers) for index, name in enumerate(weights)}
    for name, node in made_on.items():
        source, target = (folder / trainer / "published" / POLICY / name for trainer in (TRAINERS[0], trainers[node]))
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(source)
    return [NodeDisk(ELSEWHERE, f"{urls[trainer]}/files") for trainer in trainers], made_on


async def told(
    hosts: dict[str, subprocess.Popen[str]], urls: dict[str, str], policy: ArtifactRef, nearby: Nearby
) -> float:
    """Seconds until the last host has the policy."""
    session = new_session()
    fleet = Fleet(lambda: asyncio.sleep(0, [RemoteHost(Peer(record_of(name, urls[name])), session) for name in HOSTS]))
    began = time.time()
    await fleet.serve(policy, 1, Probe([1, 2], [-1.0]), nearby)
    lines = await asyncio.gather(
        *(asyncio.to_thread(process.stdout.readline) for process in hosts.values() if process.stdout)
    )
    await session.close()
    return max(float(line) for line in lines) - began


def measure(folder: Path, nodes: dict[str, Node], options: argparse.Namespace, num_files: int) -> Seconds:
    """Seconds of the tries, by the number of trainer nodes, and of the raw copies beside them."""
    trainers = TRAINERS[: max(options.trainers)]
    for name in (*trainers, *HOSTS):
        (folder / name).mkdir(parents=True)
    num_bytes = int(options.gb * 1e9)
    policy, manifest, parts = published(folder / "trainer/published", num_bytes, num_files, f"try{num_files}")
    copied = folder / "copied"
    with copied.open("wb") as file:
        file.write(os.urandom(PIECE_BYTES))
        file.truncate(num_bytes)
    ports = {name: free_port() for name in (*trainers, *HOSTS)}
    urls = {name: f"http://{nodes[name].address}:{port}" for name, port in ports.items()}
    for name in HOSTS:
        store = open_store(f"file://{folder / name}/store")
        for other, url in urls.items():
            kind = ENGINES if other in HOSTS else TRAINER
            asyncio.run(Registration(store, "runs/a", kind, record_of(other, url)).enter())
    ways = {
        f"from {count}": Nearby(POLICY, manifest, *shared(folder, parts, list(trainers[:count]), urls), parts=parts)
        for count in options.trainers
    }
    processes = {
        name: started(nodes[name], "host", name, nodes[name].address, ports[name], folder / name) for name in HOSTS
    }
    serving = [
        started(nodes[name], "trainer", name, nodes[name].address, ports[name], folder / name) for name in trainers
    ]
    seconds: Seconds = {}
    try:
        with copier(folder, nodes) as copy:
            for gbit_per_s in options.gbit_per_s:
                for node in (*trainers, *HOSTS):
                    nodes[node].throttle(gbit_per_s * 1e9 / 8)
                took = seconds[gbit_per_s] = {way: [] for way in (*ways, "raw copy")}
                for _ in range(options.tries):
                    for way, nearby in ways.items():
                        took[way].append(asyncio.run(told(processes, urls, policy, nearby)))
                    took["raw copy"].append(copy(copied))
    finally:
        for process in (*serving, *processes.values()):
            process.kill()
            process.wait(timeout=10)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--files", type=int, nargs="*", default=[1, 4])
    parser.add_argument(
        "--trainers", type=int, nargs="*", default=[1, 2], help="nodes of the trainer, each with its share of the files"
    )
    parser.add_argument("--gbit-per-s", type=float, nargs="*", default=[1.0, 10.0])
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    if reason := unavailable():
        parser.error(reason)
    os.environ[KEY_VARIABLE] = KEY
    for num_files in options.files:
        folder = options.folder.resolve() / f"files-{num_files}"
        with network("flow", *TRAINERS[: max(options.trainers)], *HOSTS) as nodes:
            from benchmarks.weights_world import enter

            enter(nodes["flow"])
            seconds = measure(folder, nodes, options, num_files)
        shutil.rmtree(folder)
        for gbit_per_s, took in seconds.items():
            medians = ", ".join(f"{way} {statistics.median(tries):.2f} s" for way, tries in took.items())
            spread = json.dumps({way: [round(value, 2) for value in sorted(tries)] for way, tries in took.items()})
            print(
                f"{options.gb:g} GB in {num_files} files to {len(HOSTS)} nodes at {gbit_per_s:g} Gbit/s: "
                f"{medians}; {spread}",
                flush=True,
            )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["trainer", name, address, port, folder]:
            trainer(name, address, int(port), Path(folder))
        case ["host", name, address, port, folder]:
            asyncio.run(host(name, address, int(port), Path(folder)))
        case _:
            main()
