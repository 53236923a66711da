"""The pool and its host against real engine processes: spread, versions, loss of an engine, reload, refusal."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlpipe.config_source import read_config
from rlpipe.engines.host import EngineHost
from rlpipe.engines.pool import Completion, EnginePool, GroupRequest
from rlpipe.types import StoreError
from rlpipe.weights import Weights, check_compatible, tensor_shapes
from tests.engine_fixtures import CONTEXT_TOKENS, tiny_model

PRESETS = Path(__file__).parent.parent / "flows" / "presets"
pytestmark = pytest.mark.e2e  # processes that import torch, restarted on purpose
GROUPS = 24


def weights(seed: int, version: int, folder: Path) -> Weights:
    """A copy of a tiny model: the host deletes what it replaces."""
    target = folder / f"version-{version}"
    shutil.copytree(tiny_model(seed), target)
    return Weights(target, version)


def requests(new_tokens: int = 6) -> list[GroupRequest]:
    params = [{"max_new_tokens": new_tokens, "sampling_seed": seed, "ignore_eos": True} for seed in range(4)]
    return [GroupRequest(f"set/{index}", [5 + index, 17, 200], params) for index in range(GROUPS)]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[EnginePool]:
    sets = ["engines.count=2", "engines.threads=1", f"model.context_tokens_max={CONTEXT_TOKENS}", "run=a"]
    pool = EnginePool(EngineHost(read_config("tiny", sets, PRESETS), tmp_path / "logs"))
    await pool.start(weights(0, 3, tmp_path))
    yield pool
    await pool.close()


def tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens for completion in group] for group in groups]


async def test_groups_are_spread_survive_a_killed_engine_and_follow_the_weights(pool: EnginePool, tmp_path: Path) -> None:
    undisturbed = await pool.generate(requests())
    by_engine = [{completion.engine for completion in group} for group in undisturbed]
    assert all(len(engines) == 1 for engines in by_engine)
    assert {name for engines in by_engine for name in engines} == {"engine-0", "engine-1"}
    assert {completion.weight_version for group in undisturbed for completion in group} == {3}

    pending = asyncio.create_task(pool.generate(requests()))
    await asyncio.sleep(0.05)
    process = pool.host.engines[0].service.process
    assert process is not None
    process.kill()
    survived = await pending
    assert tokens(survived) == tokens(undisturbed)
    assert pool.host.engines[0].service.restarts == 1

    await pool.reload(weights(1, 4, tmp_path))
    after = await pool.generate(requests())
    assert {completion.weight_version for group in after for completion in group} == {4}
    assert tokens(after) != tokens(undisturbed)
    assert not (tmp_path / "version-3").exists()

    torn = weights(2, 5, tmp_path)
    path = torn.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(StoreError, match="torn"):
        await pool.reload(torn)
    assert pool.version == 4
    assert tokens(await pool.generate(requests())) == tokens(after)


async def test_an_engine_that_refuses_a_reload_is_restarted_on_the_new_weights(pool: EnginePool, tmp_path: Path) -> None:
    process = pool.host.engines[1].service.process
    assert process is not None
    process.kill()  # found dead by the reload itself
    await pool.reload(weights(1, 4, tmp_path))
    assert [await engine.client.weight_version() for engine in pool.host.engines] == [4, 4]
    assert pool.host.engines[1].service.restarts == 1


def test_what_does_not_fit_is_named_before_an_engine_sees_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "other").mkdir()
    save_file({"model.norm.weight": torch.zeros(7)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(StoreError, match="does not fit"):
        check_compatible(tiny_model(0), tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(StoreError, match="no whole safetensors header"):
        tensor_shapes(tmp_path / "other")
    with pytest.raises(StoreError, match=r"no \.safetensors"):
        tensor_shapes(tmp_path)
