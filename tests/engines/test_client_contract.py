"""What every client and its engine do together, whichever protocol is between
them; plus what only vLLM does.

RLPIPE_TEST_ENGINE=vllm runs these against a real vLLM on this CPU, started by the host's own
command with the interpreter of the virtual environment VLLM_VENV (`make test-vllm`); the other
kinds are those of `engine_fixtures`.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import torch

from rlpipe.algorithms.divergence import top_tokens
from rlpipe.base.errors import EngineError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.config.source import read_config
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.engines.client import (
    Completion,
    EngineClient,
    EngineUnavailable,
    Heard,
    RequestRefused,
    SampleRequest,
    Sampling,
    logprobs_of,
    tokens_of,
)
from rlpipe.engines.commands import EngineAddress, argv_of, environment_of
from rlpipe.engines.kind import kind_of
from rlpipe.engines.weights import Probe, Weights
from rlpipe.extras.teacher_engine import asking
from rlpipe.extras.teacher_engine.asking import KEY_VARIABLE, ask
from rlpipe.extras.vllm.untied import untied
from rlpipe.processes.launch import Service, answers, free_port
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.rollout import BATCH, Rollout, TeacherTop
from rlpipe.services.calls import new_session
from rlpipe.store.backend import Store, open_store
from tests.deadlines import DEADLINE_S, until_async
from tests.engine_fixtures import (
    ADMIN_KEY,
    API_KEY,
    CONTEXT_TOKENS,
    ENGINE_KIND,
    VLLM_VENV,
    VOCAB,
    engine,
    reference,
    reference_logprobs,
    scratch,
    tiny_model,
)
from tests.living import signal_all, words_of
from tests.paths import PRESETS
from tests.rows import rollout
from tests.trainer_world import artifact, rollout_rows

pytestmark = pytest.mark.contract
PROMPT = [5, 17, 200, 3, 44]
TOLERANCE = 5e-5
GREEDY = Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True)
on_vllm = pytest.mark.skipif(ENGINE_KIND != "vllm", reason="a fact of vLLM")


@functools.cache
def tied(seed: int) -> Path:
    """Model `seed` with a tokenizer beside it: without one vLLM lets tokens out of
    the vocabulary through, and dies."""
    folder = scratch() / f"policy-{seed}"
    shutil.copytree(tiny_model(seed), folder)
    build_tokenizer(["text"], folder)
    return folder


def served(seed: int) -> Path:
    """The folder that an engine of this kind is given to serve model `seed`."""
    return untied(tied(seed)) if ENGINE_KIND == "vllm" else tiny_model(seed)


def start_vllm() -> tuple[Service, EngineAddress]:
    """A new vLLM on model 0, as the host starts it."""
    sets = [
        "engines.kind=vllm",
        f"engines.python={Path(VLLM_VENV).expanduser()}/bin/python",
        f"model.context_tokens_max={CONTEXT_TOKENS}",
    ]
    config = read_config("tiny", sets, PRESETS)
    address = EngineAddress(0, "127.0.0.1", free_port(), (API_KEY, ADMIN_KEY))
    service = Service(
        name="vllm",
        argv=argv_of(config, address, Weights(served(0), 1, Probe([1, 2], [0.0]))),
        log_path=scratch() / f"vllm-{address.port}.log",
        ready=lambda: answers(f"{address.url}/health"),
        environment=environment_of(config, address),
    )
    atexit.register(service.stop)
    service.start()
    service.wait_ready()
    return service, address


@functools.cache
def shared_engine() -> tuple[str, int]:
    """URL and process of the one engine of these tests; its weight version grows with each load."""
    if ENGINE_KIND == "vllm":
        service, address = start_vllm()
        assert service.process is not None
        return address.url, service.process.pid
    server = engine("client")
    return server.url, server.process.pid


def client_to(url: str, session: aiohttp.ClientSession) -> EngineClient:
    return kind_of(ENGINE_KIND).client("engine-0", url, session, (API_KEY, ADMIN_KEY))


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    """A client of the shared engine, which serves model 0."""
    url, _ = shared_engine()
    async with new_session() as session:
        client = client_to(url, session)
        try:
            await client.weight_version()
        except EngineUnavailable:  # a new vLLM does not know its version
            await client.adopt(1)
        yield client


def request(tokens: list[int], params: Sampling = GREEDY, **fields: Any) -> SampleRequest:
    return SampleRequest(uuid.uuid4().hex, tokens, replace(params, **fields))


async def sample(client: EngineClient, *requests: SampleRequest) -> list[Completion]:
    """Completions of requests none of which may be lost, each consistent in itself."""
    return await sample_heard(client, requests, [Heard() for _ in requests])


async def sample_heard(
    client: EngineClient, requests: Sequence[SampleRequest], heard: Sequence[Heard]
) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        completions = await asyncio.gather(*(client.sample(*pair) for pair in zip(requests, heard, strict=True)))
    for completion, said in zip(completions, heard, strict=True):
        assert len(completion.rollout_logprobs) == len(completion.tokens) == sum(count for _, count in completion.spans)
        assert completion.engine == "engine-0"
        assert (completion.tokens, completion.rollout_logprobs) == (tokens_of(said.tokens), logprobs_of(said.logprobs))
    return completions


def assert_logprobs(logprobs: Sequence[float | None], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), expected, atol=TOLERANCE, rtol=0)


async def test_completions_come_in_order_with_the_tokens_that_were_asked_for(client: EngineClient) -> None:
    version = await client.weight_version()
    lengths = [1 + index % 7 for index in range(20)]
    completions = await sample(
        client, *(request([3 + i, 9], max_new_tokens=length) for i, length in enumerate(lengths))
    )
    assert [len(completion.tokens) for completion in completions] == lengths
    assert all(c.finish_reason == "length" and c.finished for c in completions)
    assert [c.spans for c in completions] == [[(version, length)] for length in lengths]
    [alone] = await sample(client, request([3 + 13, 9], max_new_tokens=7))
    assert alone.tokens == completions[13].tokens


async def test_a_matched_stop_token_stays_in_the_completion(client: EngineClient) -> None:
    [free] = await sample(client, request(PROMPT))
    stop = free.tokens[3]
    [stopped] = await sample(
        client, request(PROMPT, stop_token_ids=(stop,), ignore_eos=False)
    )  # SGLang ignores both or none
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1] and stopped.finish_reason == "stop"


async def test_the_models_own_eos_stops_unless_ignored(client: EngineClient) -> None:
    hot = Sampling(max_new_tokens=16, temperature=2.0)
    prompts = [[3 + index, 40] for index in range(200)]
    stopped = await sample(client, *(request(prompt, hot, seed=index) for index, prompt in enumerate(prompts)))
    assert any(c.finish_reason == "stop" and c.tokens[-1] == 2 for c in stopped)
    assert all(2 not in c.tokens[:-1] for c in stopped)
    ignored = await sample(
        client, *(request(prompt, hot, seed=index, ignore_eos=True) for index, prompt in enumerate(prompts))
    )
    assert all(len(c.tokens) == 16 for c in ignored)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_equal_transformers(client: EngineClient, temperature: float) -> None:
    prompts = [list(range(3, 3 + length)) for length in (1, 22, 33, 70)]
    params = Sampling(max_new_tokens=20, temperature=temperature, ignore_eos=True)
    for prompt, completion in zip(
        prompts, await sample(client, *(request(each, params) for each in prompts)), strict=True
    ):
        expected = reference_logprobs(tiny_model(0), prompt, completion.tokens, temperature or 1.0)
        assert_logprobs(completion.rollout_logprobs, expected)


async def test_logprobs_of_narrowed_sampling(client: EngineClient) -> None:
    """top_p and top_k keep what they should.

    What their logprobs are differs: see docs/engines.md.
    """
    [best] = await sample(client, request(PROMPT, max_new_tokens=1))
    hot = Sampling(max_new_tokens=1, temperature=2.0, ignore_eos=True)  # vLLM refuses more
    narrow = [replace(hot, top_k=1), replace(hot, top_p=1e-6)]
    for completion in await sample(
        client, *(request(PROMPT, params, seed=seed) for params in narrow for seed in range(20))
    ):
        assert completion.tokens == best.tokens


async def test_greedy_is_equal_across_calls(client: EngineClient) -> None:
    first = await sample(client, *(request([3 + index, 9, 11], max_new_tokens=24) for index in range(8)))
    again = await sample(client, *(request([3 + index, 9, 11], max_new_tokens=24) for index in range(8)))
    assert [c.tokens for c in first] == [c.tokens for c in again]


@pytest.mark.skipif(ENGINE_KIND == "sglang", reason="SGLang on a CPU ignores seeds")
async def test_seeds_reproduce_alone_and_in_company(client: EngineClient) -> None:
    params = Sampling(max_new_tokens=24, ignore_eos=True)
    many = await sample(client, *(request(PROMPT, params, seed=seed) for seed in range(8)))
    assert len({tuple(c.tokens) for c in many}) == 8
    for seed in (0, 5):
        [alone] = await sample(client, request(PROMPT, params, seed=seed))
        assert alone.tokens == many[seed].tokens


@pytest.mark.parametrize("num_scored", [1, 50, 53])
async def test_scores_equal_transformers(client: EngineClient, num_scored: int) -> None:
    tokens = [9, 8, 7, 6, *range(100, 150)]
    expected = reference_logprobs(tiny_model(0), tokens[:-num_scored], tokens[-num_scored:])
    for _ in range(2):  # the second time there may be a prefix cache
        assert_logprobs(await client.score(tokens, num_scored), expected)


def stored_batch(store: Store, rows: list[JsonDict]) -> ArtifactRef:
    """Whole rollouts, of groups of as many as the first has."""
    size = sum(row["group_index"] == rows[0]["group_index"] for row in rows)
    rollouts = [rollout(row | {"rollout_index": at % size}) for at, row in enumerate(rows)]
    return artifact(store, "batch", {"batch.parquet": to_parquet(to_table(rollouts, Rollout, BATCH))})


@pytest.mark.parametrize("top_k", [0, 8, 1000])
async def test_a_teacher_on_an_engine_scores_the_tokens_that_are_trained(
    client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, API_KEY)
    store, rows = open_store(f"file://{tmp_path}"), rollout_rows(3, 4, seed=1)
    rows[2] |= {"loss_mask": [0] * len(rows[2]["loss_mask"])}
    address, batch = f"{ENGINE_KIND}:{client.url}", stored_batch(store, rows)
    if top_k > VOCAB and ENGINE_KIND == "vllm":
        with pytest.raises(UserError, match=f"rl.teacher_engine: .* start it with --max-logprobs {VOCAB}"):
            await ask(store, address, batch, top_k, VOCAB)
        return
    taught = await ask(store, address, batch, top_k, VOCAB)
    assert [(one.group_index, one.rollout_index) for one, _ in taught] == [(at // 4, at % 4) for at in range(12)]
    for row, (one, top) in zip(rows, taught, strict=True):
        marks = torch.tensor(row["loss_mask"], dtype=torch.bool)
        expected = reference_logprobs(tiny_model(0), row["prompt_tokens"], row["completion_tokens"])[marks]
        assert_logprobs(one.logprobs.tolist(), expected)
        if top_k:
            check_top(top, row, marks, top_k)


def check_top(top: TeacherTop, row: JsonDict, marks: torch.Tensor, top_k: int) -> None:
    """Compares with what the trainer computes of the logits of transformers; tokens that tie may
    change places."""
    tokens, start = torch.tensor([row["prompt_tokens"] + row["completion_tokens"]]), len(row["prompt_tokens"]) - 1
    with torch.inference_mode():
        logits_NV = reference(tiny_model(0))(tokens).logits[0, start:-1][marks]
    expected = top_tokens(logits_NV, top_k, 1.0)
    found = [torch.from_numpy(part).view(len(logits_NV), min(top_k, VOCAB)) for part in (top.tokens, top.logprobs)]
    given_NK = logits_NV.log_softmax(-1).gather(-1, found[0].long())
    torch.testing.assert_close(found[1], expected.logprobs_NK, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], given_NK, atol=1e-4, rtol=0)
    if expected.rest_N is None:
        assert np.isneginf(top.rest).all()
    else:
        torch.testing.assert_close(torch.from_numpy(top.rest).exp(), expected.rest_N.exp(), atol=1e-5, rtol=0)
    assert all(len({*row}) == len(row) for row in found[0].tolist())


async def test_a_teacher_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WAIT_S", 0.0)
    store, url = open_store(f"file://{tmp_path}"), f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"rl.teacher_engine: {url} did not answer in 6 tries"):
        await ask(store, f"{ENGINE_KIND}:{url}", stored_batch(store, rollout_rows(1, 2)))


async def test_a_load_changes_the_version_and_the_model(client: EngineClient) -> None:
    version = await client.weight_version()
    for step, seed in ((1, 1), (2, 0)):
        await client.load(str(served(seed)), version + step)
        assert await client.weight_version() == version + step
        [completion] = await sample(client, request(PROMPT, temperature=1.0))
        assert completion.spans == [(version + step, 8)]
        assert_logprobs(completion.rollout_logprobs, reference_logprobs(tiny_model(seed), PROMPT, completion.tokens))
        assert_logprobs(await client.score(PROMPT, 4), reference_logprobs(tiny_model(seed), PROMPT[:1], PROMPT[1:]))


@pytest.mark.skipif(ENGINE_KIND != "local", reason="SGLang and vLLM give back the memory of GPUs only")
async def test_memory_is_given_back_and_with_a_load_it_serves_again(client: EngineClient) -> None:
    version, expected = await client.weight_version(), await sample(client, request(PROMPT))
    heard = Heard()
    running = asyncio.create_task(sample_heard(client, [request(PROMPT, max_new_tokens=450)], [heard]))
    await until_async(lambda: len(heard.tokens) > 0)
    await client.release()
    assert (await running)[0].finish_reason in ("abort", "length"), "what is in flight is aborted"
    await client.resume()
    await client.load(str(served(0)), version + 1)
    assert await client.weight_version() == version + 1
    assert [c.tokens for c in await sample(client, request(PROMPT))] == [c.tokens for c in expected]


async def test_what_is_in_flight_goes_on_with_the_new_weights_and_says_so(client: EngineClient) -> None:
    async def over_a_load(version: int, seed: int, num_heard: int) -> list[Completion]:
        requests = [request([3 + i, 9, 11], temperature=1.0, max_new_tokens=450, seed=i) for i in range(4)]
        heard = [Heard() for _ in requests]
        running = asyncio.create_task(sample_heard(client, requests, heard))
        await until_async(lambda: len(heard[0].tokens) >= num_heard, look_s=0.005)
        await client.load(str(served(seed)), version)
        return await running

    version, serving, seen = await client.weight_version(), 0, 0
    for num_heard in (10, 5, 2, 40, 80, 10):
        version, before, serving = version + 1, serving, 1 - serving
        for index, completion in enumerate(await over_a_load(version, serving, num_heard)):
            assert completion.finish_reason == "length" and len(completion.tokens) == 450
            assert [label for label, _ in completion.spans] in ([version - 1], [version], [version - 1, version])
            old = sum(count for label, count in completion.spans if label < version)
            prompt, logprobs = [3 + index, 9, 11], completion.rollout_logprobs
            assert_logprobs(logprobs[:old], reference_logprobs(tiny_model(before), prompt, completion.tokens)[:old])
            assert_logprobs(logprobs[old:], reference_logprobs(tiny_model(serving), prompt, completion.tokens)[old:])
            seen += len(completion.spans) == 2
        if seen and serving == 0:
            return
    if serving == 1:
        await client.load(str(served(0)), version + 1)
    assert seen, "no generation was running while the weights were loaded"


async def test_an_abort_answers_with_what_there_is_and_leaves_the_others(client: EngineClient) -> None:
    [prompt, other] = [[3, 9, 11], [4, 9, 11]]
    for num_heard in (10, 5, 2, 40, 80):
        aborted, heard = request(prompt, temperature=1.0, max_new_tokens=450), Heard()
        kept = asyncio.create_task(sample(client, request(other, max_new_tokens=450)))
        running = asyncio.create_task(sample_heard(client, [aborted], [heard]))
        await until_async(lambda heard=heard, num=num_heard: len(heard.tokens) >= num, look_s=0.005)
        while not running.done():
            await client.abort([aborted.request_id])
            await asyncio.wait([running], timeout=0.05)  # short: it is asked again
        [completion], [whole] = await running, await kept
        assert whole.finish_reason == "length" and len(whole.tokens) == 450
        assert_logprobs(completion.rollout_logprobs, reference_logprobs(tiny_model(0), prompt, completion.tokens))
        if completion.tokens and completion.finish_reason == "abort":
            assert not completion.finished and len(completion.tokens) < 450
            return
    pytest.fail("nothing was aborted in the middle")


async def test_tokens_are_heard_as_they_come_and_left_when_the_rest_is_lost(client: EngineClient) -> None:
    prompt, heard = [3, 9, 11], Heard()
    asking = asyncio.create_task(client.sample(request(prompt, temperature=1.0, max_new_tokens=450), heard))
    await until_async(lambda: len(heard.tokens) > 0)
    asking.cancel()
    assert len(heard.tokens) == len(heard.logprobs)
    assert_logprobs([*heard.logprobs], reference_logprobs(tiny_model(0), prompt, [*heard.tokens]))
    [again] = await sample(client, request(prompt, max_new_tokens=4))
    assert len(again.tokens) == 4


TOO_LONG = {"a prompt": ([7] * 600, 1), "prompt and completion": ([7] * 500, CONTEXT_TOKENS - 400)}


@pytest.mark.parametrize(("tokens", "max_new_tokens"), TOO_LONG.values(), ids=TOO_LONG)
async def test_too_long_is_refused_and_the_engine_lives(
    client: EngineClient, tokens: list[int], max_new_tokens: int
) -> None:
    with pytest.raises(RequestRefused):
        await sample(client, request(tokens, max_new_tokens=max_new_tokens))
    assert await client.healthy() and await sample(client, request(PROMPT))


@pytest.mark.skipif(ENGINE_KIND == "sglang", reason="SGLang dies of it")
async def test_a_token_out_of_the_vocabulary_is_refused_and_the_engine_lives(client: EngineClient) -> None:
    for token in (VOCAB, 10**6, -1):
        with pytest.raises(RequestRefused):
            await sample(client, request([1, token]))
    with pytest.raises(RequestRefused):
        await client.score([1, VOCAB, 2], 2)
    assert await client.healthy() and await sample(client, request(PROMPT))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process, and all that it started, stand still: what a hung
    engine looks like from outside."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    # of vLLM only the worker: its HTTP side goes on and says that all is well
    hung = [each for each in processes if ENGINE_KIND != "vllm" or "Worker" in " ".join(words_of(each))]
    assert hung, processes
    try:
        signal_all(hung, signal.SIGSTOP)
        yield
    finally:
        signal_all(hung, signal.SIGCONT)


async def test_a_hung_engine_and_an_absent_one_are_not_healthy(client: EngineClient) -> None:
    assert await client.healthy()
    with stopped(shared_engine()[1]):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sample(client, request(PROMPT)), 1.0)  # short: it hangs
        assert not await client.healthy()
        if ENGINE_KIND != "vllm":  # it waits for the worker in a control call itself
            with pytest.raises(EngineUnavailable, match="server_info"):
                await client.load(str(served(0)), 99)
    await until_async(client.healthy)
    absent = client_to(f"http://127.0.0.1:{free_port()}", client.session)
    assert not await absent.healthy()
    with pytest.raises(EngineUnavailable):
        await sample(absent, request(PROMPT))


@on_vllm
async def test_vllm_reloads_a_tied_export_silently_wrong(client: EngineClient) -> None:
    """Why the host makes the export untied and proves each load by a probe:
    vLLM itself says that all is well."""
    version, tokens = await client.weight_version(), list(range(100, 140))
    expected = reference_logprobs(tiny_model(1), tokens[:1], tokens[1:])
    await client.load(str(tied(1)), version + 1)
    assert await client.weight_version() == version + 1 and await client.healthy()
    wrong = torch.tensor(await client.score(tokens, len(tokens) - 1), dtype=torch.float64)
    assert (wrong - expected).abs().max() > 1
    await client.load(str(served(1)), version + 2)
    assert_logprobs(await client.score(tokens, len(tokens) - 1), expected)
    await client.load(str(served(0)), version + 3)


@on_vllm
async def test_vllm_does_not_survive_a_load_of_a_missing_folder() -> None:
    service, address = start_vllm()
    try:
        async with new_session() as session:
            client = client_to(address.url, session)
            with pytest.raises(
                EngineUnavailable, match="it was started just now"
            ):  # a new one does not know its version
                await client.weight_version()
            await client.adopt(1)
            assert await client.weight_version() == 1
            with pytest.raises(EngineUnavailable, match="collective_rpc"):
                await client.load(str(scratch() / "nothing"), 2)
            with pytest.raises(EngineUnavailable):
                await sample(client, request(PROMPT))
            assert not await client.healthy()
    finally:
        service.stop()
