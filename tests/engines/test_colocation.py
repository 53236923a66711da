"""Trainer and engines on the same GPUs: what is refused, what each may take, whose turn it is, in
which order which call is made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.colocation import engine_fraction, trainer_rest_gib
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.engines.client import EngineUnavailable
from rlpipe.engines.commands import EngineAddress, argv_of
from rlpipe.engines.kind import kind_of
from rlpipe.engines.weights import Probe, Weights, reading_s
from rlpipe.loop.colocation import MemoryTurns
from rlpipe.loop.session import Session
from rlpipe.processes.gpus import gpu_gib
from rlpipe.services.calls import new_session
from rlpipe.store.limits import gpus_held
from rlpipe.store.nearby import Nearby
from rlpipe.store.opening import create_or_continue
from tests.deadlines import DEADLINE_S, until_async
from tests.paths import PRESETS
from tests.slow_engine import SlowEngine, slow_pool, wanted

ONE_GPU = [
    "model.dtype=bfloat16",
    "trainer.gpu_ids=[0]",
    "engines.gpu_ids=[0]",
    "engines.count=1",
    "engines.kind=sglang",
]
COLOCATED = "engines.colocate=true"
APART = [
    "trainer.place=elsewhere",
    "engines.place=elsewhere",
    "trainer.nodes=2",
    "engines.nodes=2",
]  # nodes that run both


def config(*sets: str) -> PipelineConfig:
    return read_config("tiny", ["run=a", COLOCATED, *sets], PRESETS)


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ["trainer.place=elsewhere"],
            r"engines\.place='process': may be another machine .*'elsewhere', .*set both to 'process', or both",
        ),
        (
            ["engines.place=elsewhere"],
            r"engines\.place='elsewhere': may be another machine .*'process', .*set both to 'process', or both",
        ),
        (["engines.place=deployment"], r"engines\.place='deployment': a work pool gives each .*colocate = false"),
        (
            [*APART, "trainer.place=deployment"],
            r"trainer\.place='deployment': a work pool gives each .*, or 'elsewhere' on nodes",
        ),
        ([*APART, "engines.nodes=1"], r"engines\.nodes=1: .* on the nodes of the trainer; set it to trainer\.nodes, 2"),
        (
            ["rl.overlap=iteration", "rl.importance=token_truncate"],
            (
                r"rl\.overlap='iteration': trains and samples at the same time, .*set rl\.overlap = 'none', or "
                r"engines\.colocate = false"
            ),
        ),
        (
            [*ONE_GPU, "engines.gpu_ids=[1]"],
            r"engines\.gpu_ids=\[1\]: with engines\.colocate .* the trainer, \[0\]; name the same",
        ),
        (["engines.kind=vllm"], r"engines\.kind='vllm': frees only the memory of GPUs, .*kind = 'local'"),
    ],
)
def test_what_keeps_them_from_sharing_is_refused_by_name(sets: list[str], line: str) -> None:
    with pytest.raises(UserError, match=rf"^{line}"):
        config(*sets)


def test_one_gpu_trains_and_samples_and_is_counted_once() -> None:
    assert gpus_held(config(*ONE_GPU), "sft") == gpus_held(config(*ONE_GPU), "rl") == 1
    two = config(*ONE_GPU, "trainer.gpu_ids=[0,1]", "trainer.ranks=2", "engines.gpu_ids=[1,0]")
    assert gpus_held(two, "rl") == 2
    with pytest.raises(UserError, match=r"give each GPU to one of the two, or set engines\.colocate = true"):
        read_config("tiny", ONE_GPU, PRESETS)
    assert config().engines.colocate  # on a CPU, for tests
    assert read_config("one-gpu", [], PRESETS).engines.colocate


@given(st.floats(8, 300), st.sampled_from(["sglang", "vllm"]), st.integers(1, 8))
def test_an_engine_leaves_the_trainer_what_it_keeps(gib: float, kind: str, ranks: int) -> None:
    gpu_ids = json.dumps([*range(ranks)])
    shared = config(
        *ONE_GPU,
        f"engines.kind={kind}",
        f"trainer.ranks={ranks}",
        f"trainer.gpu_ids={gpu_ids}",
        f"engines.gpu_ids={gpu_ids}",
    )
    fraction = engine_fraction(shared, gib)
    assert 0.1 <= fraction < 1
    assert fraction == 0.1 or fraction * gib + trainer_rest_gib(shared) < gib
    assert engine_fraction(shared, gib + 1) >= fraction


def argv(shared: PipelineConfig) -> list[str]:
    weights = Weights(Path("/weights"), 1, Probe([1, 2], [-1.0]))
    return argv_of(shared, EngineAddress(0, "127.0.0.1", 8000, ("", "")), weights)


@pytest.mark.parametrize(
    ("kind", "release", "fraction"),
    [
        ("sglang", "--enable-memory-saver", "--mem-fraction-static"),
        ("vllm", "--enable-sleep-mode", "--gpu-memory-utilization"),
    ],
)
def test_an_engine_is_told_to_release_and_how_much_it_may_take(
    kind: str, release: str, fraction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = tmp_path / "nvidia-smi"
    gpu.write_text("#!/bin/sh\necho 0, GPU-8f1c, 81559\n")
    gpu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shared = config(*ONE_GPU, f"engines.kind={kind}")
    assert gpu_gib([0]) == pytest.approx(79.65, abs=0.01) and gpu_gib([1]) is None
    words = argv(shared)
    assert release in words and words[words.index(fraction) + 1] == f"{engine_fraction(shared, 81559 / 1024):.2f}"
    for named in (f'["{fraction}", "0.5"]', f'["{fraction}=0.5"]'):
        words = argv(config(*ONE_GPU, f"engines.kind={kind}", f"engines.flags={named}"))
        assert release in words and sum(word.startswith(fraction) for word in words) == 1
    gpu.unlink()
    assert gpu_gib([0]) is None
    words = argv(shared)  # of a GPU that nobody knows it takes as much as of a small one
    assert words[words.index(fraction) + 1] == f"{engine_fraction(shared, 24):.2f}"
    apart = read_config("tiny", ["run=a", *ONE_GPU, f"engines.kind={kind}", "engines.gpu_ids=[1]"], PRESETS)
    assert release not in argv(apart) and fraction not in argv(apart)


class Sides:
    """A pool and a trainer that say what they hold. `failing`: what their next calls come to."""

    def __init__(self) -> None:
        self.holds = {"engines": False, "trainer": False}
        self.calls: list[str] = []
        self.failing = False

    def _give_back(self, side: str) -> None:
        self.calls.append(side)
        if self.failing:
            raise EngineError("it failed")
        self.holds[side] = False

    async def joined(self) -> list[Any]:
        return []

    async def release(self, joined: list[Any]) -> None:
        self._give_back("engines")

    async def offload(self) -> None:
        self._give_back("trainer")


@given(st.lists(st.tuples(st.sampled_from(["trainer", "engines"]), st.booleans()), max_size=20))
def test_both_never_hold_memory_at_once(turns: list[tuple[str, bool]]) -> None:
    async def take() -> None:
        sides: Any = Sides()
        memory, before = MemoryTurns(sides, sides.joined, sides), "nobody"
        for side, fails in turns:
            sides.failing, sides.calls = fails, []
            try:
                await (memory.to_trainer() if side == "trainer" else memory.to_engines())
            except EngineError:
                assert memory.turn == before
                continue
            other = "engines" if side == "trainer" else "trainer"
            assert sides.calls == ([] if side == before else [other]), "asked again nothing is done"
            sides.holds[side], before = True, side
            assert not sides.holds[other]

    asyncio.run(take())


async def test_a_session_makes_the_calls_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(create_or_continue(config(f"store=file://{tmp_path}", "tracking.uri=")), tmp_path / "work")
    pool, trainer, policy, calls = session.pool, session.trainer.client, ArtifactRef("policy", "sha"), []

    async def serve(policy: ArtifactRef, version: int, probe: Probe, nearby: Nearby | None) -> None:
        calls.append(f"serve {version}")
        pool.fleet._served = (policy, version, probe, nearby)

    async def start() -> None:
        calls.append("start the trainer")
        trainer.session = new_session()

    async def offload() -> None:
        calls.append("offload")

    release_all = pool.release

    async def release(joined: list[Any]) -> None:
        calls.append("release")
        await release_all(joined)

    monkeypatch.setattr("rlpipe.loop.session.probe_of", lambda *_: Probe([1, 2], [-1.0]))
    for owner, call in ((pool, serve), (pool, release), (trainer, start), (trainer, offload)):
        monkeypatch.setattr(owner, call.__name__, call)
    await session.trainer.ready()  # what RL starts from
    for version in (0, 1):
        await session.serve(policy, version)
        assert not await session.serve(policy, version) and pool.version == version
        await session.trainer.ready()
        await session.trainer.ready()
        assert pool.version is None, "engines that have no memory serve nothing"
    await session.serve(policy, 1)  # the same weights again: they have to be loaded again
    turn = ["release", "offload"]
    assert calls == [
        "release", "start the trainer", "offload", "serve 0", "release", "offload", "serve 1", *turn, "serve 1",
    ]  # fmt: skip
    await session.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_memory_is_not_given_back_under_a_rollout(is_cancelled: bool) -> None:
    """Whoever samples still is waited for, also where that is cancelled."""
    engine, trainer = SlowEngine("a", 0.01), Sides()
    async with slow_pool(engine, progress_timeout_s=DEADLINE_S) as pool:
        memory = MemoryTurns(pool, trainer.joined, trainer)  # type: ignore[arg-type]
        sampling = asyncio.create_task(pool.generate(wanted(1 << 20 if is_cancelled else 40)))
        await until_async(lambda: engine.num_sampled, "it samples")
        turning = asyncio.create_task(memory.to_trainer())
        await asyncio.sleep(0.05)
        assert memory.turn == "nobody" and pool.version is not None
        # the engine is told, though the call that it was sent in may go on for others
        if is_cancelled:
            sampling.cancel()
        await turning
        assert sampling.done() and memory.turn == "trainer" and pool.version is None
        assert len(engine.aborts) == is_cancelled


async def test_a_call_that_does_not_end_keeps_no_release_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.engines.pool.GIVEN_UP_S", 0.2)
    engine = SlowEngine("a", 0.01)
    async with slow_pool(engine, progress_timeout_s=0.1) as pool:  # short: what is given up after it
        pool._num_calls = 1
        with pytest.raises(EngineError, match="1 sampling calls do not end"):
            await pool.release([])
        pool._num_calls = 0
        await pool.release([])


@asynccontextmanager
async def played_server(
    status: dict[str, int], answer_s: float = 0.0
) -> AsyncIterator[tuple[str, list[tuple[str, str, Any]]]]:
    """A server that answers everything, and what it was asked: path, key, body.

    `status`: of paths that are refused.
    """
    calls: list[tuple[str, str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        key = request.headers["Authorization"].removeprefix("Bearer ")
        calls.append((request.path_qs, key, json.loads(body) if body else None))
        if request.path in LOADS:
            await asyncio.sleep(answer_s)
        return web.json_response({"success": True}, status=status.get(request.path, 200))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", calls
    finally:
        await runner.cleanup()


LOADS = {"/update_weights_from_disk", "/collective_rpc"}
CALLS = {
    "sglang": [
        ("/abort_request", "admin", {"abort_all": True}),
        # refused while a request is left: SGLang would die of the release
        ("/flush_cache?timeout=20", "admin", None),
        ("/release_memory_occupation", "admin", {}),
        ("/resume_memory_occupation", "admin", {}),
    ],
    "vllm": [("/sleep?level=2&mode=abort", "api", None), ("/wake_up", "api", None)],
}


@pytest.mark.parametrize("kind", CALLS)
async def test_the_calls_of_each_protocol(kind: str) -> None:
    status: dict[str, int] = {}
    async with played_server(status) as (url, calls), new_session() as session:
        client = kind_of(kind).client("engine-0", url, session, ("api", "admin"))
        await client.release()
        await client.resume()
        assert calls == CALLS[kind]
        status |= {"/flush_cache": 400, "/sleep": 500, "/wake_up": 500, "/resume_memory_occupation": 500}
        with pytest.raises(EngineError, match=r"answered (400|500)"):
            await client.release()
        assert "/release_memory_occupation" not in [path for path, *_ in calls[len(CALLS[kind]) :]]
        with pytest.raises(EngineUnavailable):
            await client.resume()


@pytest.mark.parametrize("kind", [*CALLS, "local"])
async def test_an_engine_that_was_woken_samples_nothing_before_it_has_weights(kind: str) -> None:
    async with played_server({}) as (url, calls), new_session() as session:
        client = kind_of(kind).client("engine-0", url, session, ("api", "admin"))
        await client.resume()
        await client.load("/weights", 3)
        paths = [path.split("?")[0] for path, *_ in calls]
        loaded = min(number for number, path in enumerate(paths) if path in LOADS)
        sampling = {"/health", "/health_generate", "/generate", "/inference/v1/generate"}
        assert loaded and not sampling & {*paths[: loaded + 1]}, paths
        assert kind == "vllm" or paths[1] == "/server_info", "what a hung scheduler does not answer"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*CALLS, "local"])
async def test_the_time_to_load_follows_the_bytes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, num_bytes in (("model-00001-of-00002", 200e9), ("model-00002-of-00002", 270e9)):
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.truncate(int(num_bytes))  # takes nothing of the disk
    assert reading_s(tmp_path) == 2350
    for module in ("engines.sglang_client", "extras.vllm.client"):
        monkeypatch.setattr(f"rlpipe.{module}.LOAD_TIMEOUT_S", 0.2)
    async with played_server({}, answer_s=1.0) as (url, _), new_session() as session:
        client = kind_of(kind).client("engine-0", url, session, ("api", "admin"))
        await client.load(str(tmp_path), 3)
        with pytest.raises(EngineUnavailable):
            await client.load(str(tmp_path / "small"), 3)
