"""Engines that load an adapter beside their base: which do, with what they are started, in what
order they are told, and what they are asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from rlpipe.base.errors import EngineError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.engines.adapters import ADAPTER, LAYERS, loads_adapters
from rlpipe.engines.client import EngineClient, Heard, RequestRefused, SampleRequest, Sampling
from rlpipe.engines.commands import EngineAddress
from rlpipe.engines.engine import Engine
from rlpipe.engines.host import EngineHost
from rlpipe.engines.kind import kind_of
from rlpipe.engines.remote import RemoteHost
from rlpipe.engines.weights import Probe, Weights
from rlpipe.processes.launch import free_port
from rlpipe.services.calls import new_session
from rlpipe.services.finder import Peer
from rlpipe.services.registration import ServiceRecord
from tests.engine_fixtures import tiny_model
from tests.paths import PRESETS

PROBE = Probe([1, 2], [-1.0])


def base(folder: Path, family: str = "qwen2") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def settings(kind: str, *sets: str) -> PipelineConfig:
    return read_config("tiny", [f"engines.kind={kind}", "model.adapter=lora", *sets], PRESETS)


@pytest.mark.parametrize(
    ("kind", "family", "sets", "loads"),
    [
        ("sglang", "qwen2", [], True),
        ("vllm", "llama", ["model.adapter_rank=24"], True),
        ("sglang", "qwen3", ["model.adapter_targets=['q_proj', 'v_proj']"], True),
        ("vllm", "qwen3", ["model.adapter_targets=['layers.0.self_attn.q_proj']"], False),
        ("local", "qwen3", [], False),
        ("sglang", "gemma3_text", [], False),
        ("sglang", "phi3", [], False),
        ("vllm", "qwen3", ["model.adapter_rank=513"], False),
        ("vllm", "qwen3", ['model.adapter="none"'], False),
    ],
)
def test_which_engines_load_adapters(kind: str, family: str, sets: list[str], loads: bool, tmp_path: Path) -> None:
    config, folder = settings(kind, *sets), base(tmp_path / "base", family)
    assert loads_adapters(config, folder) == loads
    argv = kind_of(kind).argv(config, Weights(folder, 0, PROBE), [])
    assert ("--enable-lora" in argv) == loads


def test_flags_of_each_kind(tmp_path: Path) -> None:
    weights, sets = Weights(base(tmp_path / "base"), 0, PROBE), "model.adapter_rank=24"
    assert kind_of("vllm").argv(settings("vllm", sets), weights, [])[-1] == "32"
    flags = kind_of("sglang").argv(settings("sglang", sets), weights, [])
    assert flags[flags.index("--max-lora-rank") + 1] == "24" and {*LAYERS} < {*flags} and flags[-1] == "torch_native"


class Played:
    """A server that notes what it is told; `refuses`: a path that it answers with 400."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.refuses = ""

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path_qs
        self.calls.append(path)
        if await request.read():
            self.bodies[request.path] = await request.json()
        return web.json_response({"success": True}, status=400 if request.path == self.refuses else 200)


@pytest.fixture
async def played() -> AsyncIterator[tuple[Played, str]]:
    server, port = Played(), free_port()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield server, f"http://127.0.0.1:{port}"
    await runner.cleanup()


ORDER = {
    "sglang": [
        "/server_info", "/pause_generation", "/unload_lora_adapter", "/load_lora_adapter", "/flush_cache",
        "/update_weight_version", "/continue_generation",
    ],
    "vllm": [
        "/pause?mode=abort", "/v1/load_lora_adapter", "/update_weight_version",
        "/reset_prefix_cache?reset_running_requests=true", "/resume",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_adapter_takes_the_place_of_the_one_before_while_nothing_runs(
    kind: str, played: tuple[Played, str], tmp_path: Path
) -> None:
    server, url = played
    async with new_session() as session:
        client = kind_of(kind).client("engine-0", url, session, ("api", "admin"))
        await client.load_adapter(str(base(tmp_path / "a")), 3)
        assert client.adapted and "/unload_lora_adapter" not in server.calls
        server.calls.clear()
        await client.load_adapter(str(base(tmp_path / "b")), 4)
        assert server.calls == ORDER[kind]
        load = server.bodies["/load_lora_adapter" if kind == "sglang" else "/v1/load_lora_adapter"]
        assert (load["lora_name"], load["lora_path"]) == (ADAPTER, str(tmp_path / "b"))
        assert server.bodies["/update_weight_version"]["new_version"] == "4"
        await ask_in_vain(client)
        asked = server.bodies["/generate" if kind == "sglang" else "/inference/v1/generate"]
        assert asked["lora_path" if kind == "sglang" else "model"] == ADAPTER
        await client.load_adapter("", 5)
        assert not client.adapted
        await ask_in_vain(client)
        assert (
            not {"lora_path", "model"}
            & server.bodies["/generate" if kind == "sglang" else "/inference/v1/generate"].keys()
        )


async def ask_in_vain(client: EngineClient) -> None:
    """A request that the played server does not answer with tokens."""
    with pytest.raises(EngineError):
        await client.sample(SampleRequest("0", [1], Sampling(4)), Heard())


@pytest.mark.parametrize(
    ("kind", "load", "goes_on"),
    [("sglang", "/load_lora_adapter", "/continue_generation"), ("vllm", "/v1/load_lora_adapter", "/resume")],
)
async def test_an_engine_that_refuses_an_adapter_goes_on_and_says_so(
    kind: str, load: str, goes_on: str, played: tuple[Played, str], tmp_path: Path
) -> None:
    server, url = played
    server.refuses = load
    async with new_session() as session:
        with pytest.raises(RequestRefused):
            await (
                kind_of(kind)
                .client("engine-0", url, session, ("api", "admin"))
                .load_adapter(str(base(tmp_path / "a")), 3)
            )
    assert server.calls[-1] == goes_on and "/update_weight_version" not in server.calls


async def test_what_an_engine_is_told_of_each_policy(tmp_path: Path) -> None:
    told: list[tuple[object, ...]] = []

    class Client:
        name, adapted = "engine-0", True

        async def adopt(self, version: int) -> None:
            told.append(("adopt", version))

        async def load(self, path: str, version: int) -> None:
            told.append(("load", path, version))

        async def load_adapter(self, path: str, version: int) -> None:
            told.append(("adapter", path, version))

    engine = Engine(EngineAddress(0, "127.0.0.1", 0, ("", "")), SimpleNamespace(), Client())  # type: ignore[arg-type]
    one, other = tmp_path / "one", tmp_path / "other"
    await engine.started_on(Weights(one, 0, PROBE, ""))
    await engine.load(Weights(one, 1, PROBE, "a1"))
    await engine.load(Weights(one, 0, PROBE, ""))
    with pytest.raises(EngineError, match="was started on"):  # then the host starts it anew
        await engine.load(Weights(other, 2, PROBE, "a2"))
    await engine.started_on(Weights(other, 2, PROBE, "a2"))
    await engine.load(Weights(one, 3, PROBE))
    assert told == [
        ("adopt", 0), ("adapter", "a1", 1), ("adapter", "", 0), ("adopt", 2),
        ("adapter", "a2", 2), ("load", str(one), 3),
    ]  # fmt: skip


async def test_the_adapter_that_a_restart_is_to_load_stays_while_a_newer_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the base first, for minutes; behind its back the adapter was removed, and the
    restart was for nothing."""
    local = tmp_path / "weights"
    host = EngineHost(settings("sglang"), SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    host.weights, restarted, newest = (
        Weights(tiny_model(0), version, PROBE, str(local / name), local / name) for version, name in enumerate("abc")
    )
    for name in "abc":
        (local / name).mkdir(parents=True)

    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(host, "_fetch", lambda *_: newest)
    monkeypatch.setattr(host, "_reload", nothing)
    engine = Engine(EngineAddress(0, "127.0.0.1", 0, ("", "")), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    engine.restarting_on = restarted
    host.engines = [engine]
    await host.serve(ArtifactRef("runs/a/policy", "0" * 64), 2, PROBE)
    assert {entry.name for entry in local.iterdir()} == {"b", "c"}


async def test_the_engines_of_another_node_are_asked_for_the_adapter_that_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = RemoteHost(Peer(ServiceRecord("far", "http://far", "vllm")), SimpleNamespace())  # type: ignore[arg-type]

    async def told(*_: object) -> dict[str, object]:
        engines = [
            {"name": f"far-{index}", "url": "http://far", "adapted": adapted}
            for index, adapted in enumerate((True, False))
        ]
        return {"engines": engines, "progress": 0}

    monkeypatch.setattr(host, "_call", told)
    assert [client.adapted for client in await host.clients(3)] == [True, False]
