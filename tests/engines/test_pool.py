"""The pool and its host against real engines: spread, versions, lost and hung
engines, reloads that fail or lie.

Also run on real SGLang servers (marker `contract`). The tests share two engines and leave them
well, whatever their version.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import pytest_asyncio

from rlpipe.base.errors import EngineError, StoreError
from rlpipe.engines.client import NOTHING_YET, Completion, EngineUnavailable, Sampling
from rlpipe.engines.engine import Engine
from rlpipe.engines.pool import GroupRequest
from rlpipe.engines.proof import TOLERANCE
from rlpipe.engines.weights import Weights, check_compatible, reading_s
from rlpipe.models.folder import tensor_shapes
from rlpipe.processes.launch import READY_TIMEOUT_S
from tests.deadlines import SHORT_S, until_async
from tests.engine_fixtures import ENGINE_KIND, reference_logprobs, tiny_model
from tests.engine_world import (
    GROUP_SIZE,
    GROUPS,
    SEEDED,
    World,
    logprobs,
    probe,
    requests,
    tokens,
    unavailable,
    versions,
    world,
)

# processes that import torch, restarted on purpose
pytestmark = [pytest.mark.e2e, pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]
LONG = 60  # tokens of a completion that is still running when something happens
HUNG_S = 3 * SHORT_S
BOTH = {"engine-0", "engine-1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with world(tmp_path_factory.mktemp("pool"), f"engines.hung_timeout_s={HUNG_S}") as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def two(shared: World) -> AsyncIterator[World]:
    await shared.until_back()
    yield shared


def check_whole(groups: list[list[Completion]], new_tokens: int) -> None:
    """No rollout is lost, none came twice, none was cut."""
    assert [len(group) for group in groups] == [GROUP_SIZE] * GROUPS
    assert all(completion.finish_reason == "length" for group in groups for completion in group)
    assert all(len(completion.tokens) == new_tokens for group in groups for completion in group)


def check_same(groups: list[list[Completion]], undisturbed: list[list[Completion]]) -> None:
    """Seeded sampling gives the same tokens on any engine: with the local one to the bit."""
    if SEEDED:
        assert tokens(groups) == tokens(undisturbed)
        assert logprobs(groups) == logprobs(undisturbed)


def engines_of(groups: list[list[Completion]]) -> set[str]:
    return {completion.engine for group in groups for completion in group}


async def test_groups_are_spread_and_follow_the_weights(two: World) -> None:
    before, version = await two.pool.generate(requests()), two.version
    check_whole(before, 6)
    assert all(len(engines_of([group])) == 1 for group in before) and engines_of(before) == BOTH
    assert versions(before) == {version}
    await two.serve(two.other)
    after = await two.pool.generate(requests())
    assert versions(after) == {version + 1} and tokens(after) != tokens(before)
    assert len(list((two.host.work_dir / "weights").iterdir())) == 1  # old versions are pruned


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_lost_engine_costs_its_unfinished_rollouts_and_comes_back(
    two: World, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed, restarts = await two.pool.generate(requests(LONG)), two.restarts()
    pending = asyncio.create_task(two.pool.generate(requests(LONG)))
    await asyncio.sleep(0.1)
    two.signal(0, number)
    survived = await pending
    check_whole(survived, LONG)
    check_same(survived, undisturbed)
    # vLLM's server outlives its worker for a moment
    await until_async(lambda: two.restarts() != restarts)
    await two.until_back()
    assert two.restarts() == [restarts[0] + 1, restarts[1]]
    assert engines_of(await two.pool.generate(requests())) == BOTH
    assert sum("is back, on weight version" in message for message in caplog.messages) == 1


async def test_what_is_heard_of_a_completion_is_its_beginning_also_when_its_engine_is_killed(tmp_path: Path) -> None:
    quick = ['engines.environment={RLPIPE_STREAM_S="0.01"}'] if ENGINE_KIND == "local" else []
    async with world(tmp_path, *quick) as made:
        params = Sampling(LONG, seed=5, ignore_eos=True)
        undisturbed = await made.pool.generate([GroupRequest("set/0", [5, 17, 200], [params], [NOTHING_YET])])
        heard: list[list[int]] = []

        def hear(so_far: Completion) -> None:
            if not heard:
                for index in range(2):  # whichever it is
                    made.signal(index, signal.SIGKILL)
            heard.append(so_far.tokens.tolist())

        group = GroupRequest("set/0", [5, 17, 200], [params], [NOTHING_YET], hear=hear)
        [[completion]] = await made.pool.generate([group])
    assert len(completion.tokens) == LONG and heard[-1] == completion.tokens.tolist()
    assert not SEEDED or all(completion.tokens.tolist()[: len(part)] == part for part in heard)
    check_same([[completion]], undisturbed)


async def test_engines_that_come_back_on_a_policy_do_not_load_it_again_when_it_is_served_again(
    two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no engine samples the pool has its hosts serve the policy again, every few seconds:
    a load of what an engine serves already would compute its running requests in another way."""
    loaded, restarts = list[Path](), two.restarts()
    load = Engine.load

    async def noted(engine: Engine, weights: Weights) -> None:
        loaded.append(weights.folder)
        await load(engine, weights)

    monkeypatch.setattr(Engine, "load", noted)
    for index in range(2):
        two.signal(index, signal.SIGKILL)
    await until_async(lambda: all(engine.restarting_on for engine in two.host.engines))
    await two.host.serve(two.policy(two.serving), two.version, probe(two.serving))
    assert await two.host.clients(two.version), "it returns once one of them samples"
    await two.until_back()
    await two.host.serve(two.policy(two.serving), two.version, probe(two.serving))
    assert loaded == [] and two.restarts() == [count + 1 for count in restarts]


async def test_an_engine_that_comes_back_on_a_policy_that_another_replaced_is_not_taken_for_it(
    two: World,
) -> None:
    """The two have one weight version, as the first was never committed."""
    wanted = probe(two.other)
    two.signal(0, signal.SIGKILL)
    await until_async(lambda: two.engine(0).restarting_on is not None)
    await two.host.serve(two.policy(two.other), two.version, wanted)
    two.serving = two.other
    await two.until_back()
    for client in await two.host.clients(two.version):
        scored = await client.score(wanted.tokens, len(wanted.logprobs))
        assert max(abs(one - other) for one, other in zip(scored, wanted.logprobs, strict=True)) < 1e-3


async def test_an_engine_whose_port_is_taken_meanwhile_comes_back_on_another(
    two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the time to read its weights, too: here as if the small model were a large one."""
    monkeypatch.setattr("rlpipe.engines.weights.READ_BYTES_S", 1e3)
    engine, restarts = two.engine(0), two.restarts()
    port = engine.address.port
    assert port < 32_768, "the kernel gives none of these to a connection"
    async with engine.control:  # nobody restarts it meanwhile
        two.signal(0, signal.SIGKILL)
        await asyncio.to_thread(engine.service.stop)
        with socket.create_server(("127.0.0.1", port)):
            await two.host._restart(engine)
    await two.until_back()
    assert two.restarts() == [restarts[0] + 1, restarts[1]] and engine.address.port != port
    assert two.host.weights is not None and (more := reading_s(two.host.weights.folder)) > 1
    assert engine.service.ready_timeout_s == READY_TIMEOUT_S + more
    assert engines_of(await two.pool.generate(requests())) == BOTH


async def test_an_engine_that_answers_503_gets_nothing_until_it_is_well(two: World) -> None:
    undisturbed = await two.pool.generate(requests())
    async with unavailable(two.engine(0)) as recovered:
        survived = await two.pool.generate(requests())
        check_whole(survived, 6)
        check_same(survived, undisturbed)
        assert engines_of(survived) == {"engine-1"}
        recovered.set()
        await two.until_back()


async def test_an_engine_that_dies_before_a_reload_comes_back_on_the_new_weights(two: World) -> None:
    two.signal(1, signal.SIGKILL)
    await two.serve(two.other)
    assert versions(await two.pool.generate(requests())) == {two.version}
    await two.until_back()


async def test_a_hung_engine_does_not_keep_new_weights_from_the_other(two: World) -> None:
    two.signal(0, signal.SIGSTOP)
    await two.serve(two.other)  # its calls run into their deadline
    assert versions(await two.pool.generate(requests())) == {two.version}
    await two.until_back()


async def test_engines_with_another_policy_of_the_same_version_sample_nothing_until_they_have_this_one(
    two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow was killed before it committed what its host serves, and the next start
    of the run has made other bits."""
    fetch, proved = two.host._fetch, list[int | None]()

    def fetched(*asked: Any) -> Weights:
        proved.extend(engine.proved for engine in two.host.engines)
        return fetch(*asked)

    monkeypatch.setattr(two.host, "_fetch", fetched)
    wanted = probe(two.other)
    await two.host.serve(two.policy(two.other), two.version, wanted)
    two.serving = two.other
    assert proved == [None, None]
    clients = await two.host.clients(two.version)
    assert len(clients) == 2
    for client in clients:
        scored = await client.score(wanted.tokens, len(wanted.logprobs))
        assert max(abs(one - other) for one, other in zip(scored, wanted.logprobs, strict=True)) < 1e-3


async def test_an_engine_that_takes_several_iterations_to_come_back_finds_its_weights(two: World) -> None:
    restarts = two.restarts()
    two.signal(0, signal.SIGKILL)
    for _ in range(3):
        await asyncio.sleep(1)
        await two.serve(two.other)
        assert versions(await two.pool.generate(requests(2))) == {two.version}
    await two.until_back()
    assert two.restarts() == [restarts[0] + 1, restarts[1]]
    assert len(list((two.host.work_dir / "weights").iterdir())) <= 2


async def test_a_reload_that_did_nothing_but_says_it_did_is_caught_by_the_probe(
    two: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client, restarts = two.engine(0).client, two.restarts()
    load, old = client.load, str(tiny_model(two.serving))

    async def lie(model_path: str, version: int) -> None:
        await load(old, version)
        assert await client.weight_version() == version  # 200, and the right version

    monkeypatch.setattr(client, "load", lie)
    await two.serve(two.other)
    assert versions(await two.pool.generate(requests())) == {two.version}
    await two.until_back()
    assert two.restarts() == [restarts[0] + 1, restarts[1]]


@pytest.mark.parametrize("by", ["checksum", "answer"])
async def test_an_engine_that_kept_its_weights_is_caught_however_small_the_step(
    two: World, by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The old answer is within the tolerance of the new one: as it
    is in bfloat16 after any step."""

    def step(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        save_file(
            tensors | {"model.norm.weight": tensors["model.norm.weight"] * (1 + 2e-6)},
            folder / "model.safetensors",
            {"format": "pt"},
        )

    if two.serving != 0:
        await two.serve(0)
    policy = two.policy(0, f"a-step-{by}", step)
    trained = Path(two.store.url.removeprefix("file://")).parent / f"source-a-step-{by}"
    old, new = (
        probe(0),
        replace(probe(0), logprobs=reference_logprobs(trained, probe(0).tokens[:1], probe(0).tokens[1:]).tolist()),
    )
    assert (
        0
        < fmean(abs(one - other) for one, other in zip(old.logprobs, new.logprobs, strict=True))
        < TOLERANCE["float32"] / 2
    )
    client, restarts = two.engine(0).client, two.restarts()
    load, kept = client.load, str(tiny_model(0))

    async def nothing(model_path: str, version: int) -> None:
        await load(kept, version)

    async def none() -> str:
        return ""

    monkeypatch.setattr(client, "load", nothing)
    if by == "answer" or ENGINE_KIND == "vllm":
        monkeypatch.setattr(client, "checksum", none)
    await two.pool.serve(policy, two.version + 1, new)
    two.version += 1
    await two.until_back()
    assert two.restarts() == [restarts[0] + 1, restarts[1]]
    why = "did not load" if by == "checksum" and ENGINE_KIND != "vllm" else "it has the old weights"
    assert sum(why in message for message in caplog.messages) == 1, caplog.messages
    monkeypatch.undo()
    # the same bytes again: nothing can differ, and nothing is wrong
    await two.pool.serve(policy, two.version + 1, new)
    two.version += 1
    assert two.restarts() == [restarts[0] + 1, restarts[1]] and len(await two.host.clients(two.version)) == 2
    await two.serve(1)


async def test_a_failed_reload_quarantines_one_engine_while_the_other_samples(
    two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(model_path: str, version: int) -> None:
        raise EngineUnavailable("the reload was cut off")

    monkeypatch.setattr(two.engine(0).client, "load", fail)
    await two.serve(two.other)
    groups = await two.pool.generate(requests())
    check_whole(groups, 6)
    assert versions(groups) == {two.version}
    await two.until_back()


async def test_torn_weights_are_refused_before_an_engine_sees_them(two: World) -> None:
    before = await two.pool.generate(requests())

    def tear(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])

    def widen(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "model.norm.weight": torch.ones(64)}, folder / "model.safetensors")

    for name, damage, told in (("torn", tear, r"model\.safetensors is torn"), ("wide", widen, r"does not fit.*norm")):
        with pytest.raises(StoreError, match=told):
            await two.pool.serve(two.policy(1, name, damage), two.version + 1, probe(1))
    assert two.pool.version == two.version
    check_same(await two.pool.generate(requests()), before)


async def test_enough_cuts_short_what_runs_and_it_goes_on_later_under_new_weights(two: World) -> None:
    old = two.version
    orders = [*requests(20, groups=4), *requests(400)[4:]]

    async def cut_at_second_group() -> dict[int, list[Completion]]:
        """The groups that were cut short; none where the engines
        were done before there was enough."""
        enough, finished = asyncio.Event(), set[int]()

        async def on_group(index: int, group: list[Completion]) -> None:
            finished.add(index)
            if len(finished) == 2:
                enough.set()

        groups = await two.pool.generate(orders, on_group, enough)
        cut = {
            index: group for index, group in enumerate(groups) if not all(completion.finished for completion in group)
        }
        assert finished == set(range(GROUPS)) - set(cut)
        has_some = any(completion.tokens for group in cut.values() for completion in group)
        return cut if len(cut) >= GROUPS - 4 and has_some else {}

    cut = await until_async(cut_at_second_group, "the engines are done before there is enough")
    await two.serve(two.other)
    done = await two.pool.generate([replace(orders[index], prior=group) for index, group in cut.items()])
    for prior, group in zip(cut.values(), done, strict=True):
        for before, after in zip(prior, group, strict=True):
            assert after.finished and after.tokens[: len(before.tokens)] == before.tokens
            assert after.rollout_logprobs[: len(before.tokens)] == before.rollout_logprobs
            wanted = [(old, len(before.tokens)), (two.version, len(after.tokens) - len(before.tokens))]
            assert after.spans == [span for span in wanted if span[1]]


@pytest.mark.parametrize("reloads", [30, pytest.param(200, marks=pytest.mark.soak)])
async def test_reloads_leave_memory_flat_and_never_a_stale_version(two: World, reloads: int) -> None:
    restarts, sizes, known = two.restarts(), [], {}
    for _ in range(reloads):
        await two.serve(two.other)
        groups = await two.pool.generate(requests(2, groups=4))
        assert versions(groups) == {two.version}
        check_same(groups, known.setdefault(two.serving, groups))
        sizes.append(two.memory_bytes())
    third = reloads // 3
    assert max(sizes[-third:]) < max(sizes[third:-third]) * 1.05, sizes[::10]
    assert two.restarts() == restarts


@pytest.mark.skipif(ENGINE_KIND != "vllm", reason="a fact of vLLM")
async def test_vllm_reloads_a_tied_model_wrongly_and_does_not_get_to_sample(
    two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = two.restarts()
    monkeypatch.setattr("rlpipe.extras.vllm.kind.untied", lambda folder: folder)
    await two.serve(two.other)  # 200 and the right version from both; the probe says otherwise
    await two.until_back()
    assert two.restarts() == [count + 1 for count in restarts]
    groups = await two.pool.generate(requests())
    check_whole(groups, 6)
    assert versions(groups) == {two.version}


async def test_weights_that_no_engine_serves_rightly_stop_the_run(tmp_path: Path) -> None:
    async with world(tmp_path, "engines.count=1", restarts_max=1) as one:
        with pytest.raises(EngineError, match=r"ended 2 times|away from the trainer"):
            await one.pool.serve(one.policy(1), 4, probe(0))  # the trainer says otherwise
        assert one.pool.version is None


async def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    (tmp_path / "other").mkdir()
    save_file({"model.norm.weight": torch.zeros(7)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(StoreError, match="does not fit"):
        check_compatible(tiny_model(0), tmp_path / "other")
    halves = {name: tensor.half() for name, tensor in load_file(tiny_model(0) / "model.safetensors").items()}
    save_file(halves, tmp_path / "other" / "model.safetensors")
    check_compatible(
        tmp_path / "other", tiny_model(0)
    )  # a base model of another number type is trained and served in ours
    (tmp_path / "other" / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(StoreError, match=r"model\.safetensors is torn"):
        tensor_shapes(tmp_path / "other")
    with pytest.raises(StoreError, match=r"no \.safetensors"):
        tensor_shapes(tmp_path)
