"""Pause, continue, abort, reload over HTTP. One contract, every engine.

Runs against the engine that RLPIPE_TEST_ENGINE names; what holds for rlpipe's own engine
only is in extras/local_engine/test_local.py.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.deadlines import DEADLINE_S
from tests.engine_fixtures import API_KEY, engine, engine_of_its_own, reference_logprobs, sampled, tiny_model

pytestmark = pytest.mark.contract
PROMPT = [5, 17, 200, 3, 44]
NUM_LONG = 200
STARTS_MAX = 5
LONG = {"max_new_tokens": NUM_LONG, "ignore_eos": True}
GREEDY = {**LONG, "temperature": 0}
NUM_LONGEST = 450  # for requests that never get there
LONGEST = {**LONG, "max_new_tokens": NUM_LONGEST}
HEALTH_S = 20
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.fixture(autouse=True)
async def _version_one() -> AsyncIterator[None]:
    """Every test starts on model 0 as version 1, not paused, with nothing running."""
    yield
    await engine("a").call("/continue_generation", {})
    await engine("a").call("/abort_request", {"abort_all": True})
    await engine("a").until_idle()
    await engine("a").reload(tiny_model(0), "1")


async def started(params: dict[str, Any], **fields: Any) -> asyncio.Task[Any]:
    """A request that has sampled a first token."""
    for _ in range(STARTS_MAX):  # on a busy machine it may be finished before it is seen running
        task = asyncio.create_task(engine("a").generate(PROMPT, params, **fields))
        seen = asyncio.create_task(engine("a").until_running(1, len(PROMPT) + 1))
        await asyncio.wait([task, seen], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await seen
            return task
        seen.cancel()
    raise AssertionError(f"{STARTS_MAX} requests were finished before they were seen running")


async def pause(mode: str) -> None:
    status, answer = await engine("a").call("/pause_generation", {"mode": mode})
    assert status == 200 and answer["status"] == "ok", answer


async def resume() -> None:
    status, answer = await engine("a").call("/continue_generation", {})
    assert status == 200 and answer["status"] == "ok", answer


async def checksums() -> tuple[dict[str, str], str]:
    """Of each tensor that serves, and of all."""
    status, answer = await engine("a").call("/weights_checker", {"action": "checksum"})
    assert status == 200 and answer["success"] is True
    (rank,) = answer["ranks"]
    return rank["checksums"], answer["per_engine_checksum"]


def check_logprobs(answer: Any, folders: list[Path]) -> None:
    """The logprobs of each span of weight versions are those of the folder in its place."""
    tokens, logprobs = sampled(answer)
    spans = answer["meta_info"]["weight_versions"]
    assert len(spans) == len(folders) and spans[0]["start"] == 0 and spans[-1]["end"] == len(tokens)
    expected = [
        reference_logprobs(folder, PROMPT, tokens)[span["start"] : span["end"]]
        for span, folder in zip(spans, folders, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), torch.cat(expected), atol=5e-5, rtol=0)


async def test_pause_abort_answers_with_what_there_is() -> None:
    running = await started(LONGEST)
    await pause("abort")
    answer = await running
    assert answer["meta_info"]["finish_reason"] == ABORTED and answer["meta_info"]["prompt_tokens"] == len(PROMPT)
    tokens, _ = sampled(answer)
    assert len(tokens) == answer["meta_info"]["completion_tokens"] < NUM_LONGEST
    check_logprobs(answer, [tiny_model(0)])


async def test_while_paused_requests_wait_and_ready_says_so() -> None:
    await pause("abort")
    assert (await engine("a").get("/ready"))[0] == 503
    waits = asyncio.create_task(engine("a").generate(PROMPT, {"max_new_tokens": 1}))
    health = asyncio.create_task(engine("a").get("/health"))
    await asyncio.sleep(1.5)
    assert not waits.done() and not health.done()
    assert (await engine("a").get("/model_info"))[0] == 200
    await resume()
    assert len((await waits)["output_ids"]) == 1 and (await health)[0] == 200
    assert (await engine("a").get("/ready"))[0] == 200


async def test_health_of_a_long_pause_is_503() -> None:
    if (await engine("a").get("/server_info"))[1].get("engine") == "rlpipe-local":
        pytest.skip(f"the unit run does not wait {HEALTH_S} s for a constant of our own server")
    await pause("retract")
    before_s = asyncio.get_running_loop().time()
    assert (await engine("a").get("/health"))[0] == 503
    assert asyncio.get_running_loop().time() - before_s > HEALTH_S - 1


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_pause_and_continue_change_no_token(mode: str) -> None:
    whole = sampled(await engine("a").generate(PROMPT, GREEDY))
    running = await started(GREEDY)
    await pause(mode)
    assert not running.done()
    await resume()
    tokens, logprobs = sampled(await running)
    assert tokens == whole[0]
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(whole[1]), atol=1e-4, rtol=0)


async def test_retracted_requests_go_on_under_the_new_weights() -> None:
    running = await started(LONG)
    await pause("retract")
    status, answer = await engine("a").update(tiny_model(1), "2")
    assert status == 200 and answer["success"] is True and answer["num_paused_requests"] == 0
    await resume()
    answer = await running
    old, new = answer["meta_info"]["weight_versions"]
    assert (old["version"], new["version"]) == ("1", "2") and answer["meta_info"]["weight_version"] == "2"
    assert 0 < old["end"] == new["start"] < new["end"] == NUM_LONG
    check_logprobs(answer, [tiny_model(0), tiny_model(1)])


async def test_an_update_with_flush_is_refused_while_requests_stay_in_place_and_holds_when_sent_again() -> None:
    running = await started(LONG)
    await pause("in_place")
    status, answer = await engine("a").update(tiny_model(1), "2")
    assert status == 400 and answer["success"] is False and answer["message"]
    assert (await engine("a").call("/flush_cache"))[0] == 400
    assert (await engine("a").get("/model_info"))[1]["weight_version"] == "1"
    await pause("retract")
    status, answer = await engine("a").update(tiny_model(1), "2")
    assert status == 200 and answer["success"] is True
    await resume()
    spans = (await running)["meta_info"]["weight_versions"]
    assert (spans[0]["version"], spans[-1]["version"], spans[-1]["end"]) == ("1", "2", NUM_LONG)
    check_logprobs(await engine("a").generate(PROMPT, {**LONG, "max_new_tokens": 16}), [tiny_model(1)])


async def test_a_flush_is_refused_while_requests_run() -> None:
    running = await started(LONG)
    assert (await engine("a").call("/flush_cache"))[0] == 400
    await running
    assert (await engine("a").call("/flush_cache"))[0] == 200


async def test_control_calls_that_make_no_sense() -> None:
    status, answer = await engine("a").call("/pause_generation", {"mode": "gently"})
    assert status == 400 and "retract" in answer["message"]
    assert (await engine("a").call("/update_weights_from_disk", {}))[0] == 400
    assert (await engine("a").call("/update_weights_from_disk", {"model_path": "/no/folder", "weight_version": 9}))[
        0
    ] == 400
    status, answer = await engine("a").update(Path("/no/folder"), "9")
    assert status == 400 and answer["success"] is False and "/no/folder" in answer["message"]
    status, answer = await engine("a").call("/weights_checker", {"action": "taste"})
    assert status == 400 and answer["success"] is False
    assert (await engine("a").get("/model_info"))[1]["weight_version"] == "1"
    assert (await engine("a").call("/continue_generation", {}))[0] == 200


async def test_abort_takes_a_live_rid_and_all_that_begin_with_it() -> None:
    tasks = {rid: asyncio.create_task(engine("a").generate(PROMPT, LONG, rid=rid)) for rid in ("p4", "p40", "p5")}
    await engine("a").until_running(3)
    for nobody in ("p", "nobody", ""):
        assert (await engine("a").call("/abort_request", {"rid": nobody}))[0] == 200
    assert (await engine("a").call("/abort_request", {}))[0] == 200
    assert (await engine("a").call("/abort_request", {"rid": "p4"}))[0] == 200
    answers = {rid: await task for rid, task in tasks.items()}
    assert {rid: answer["meta_info"]["finish_reason"]["type"] for rid, answer in answers.items()} == {
        "p4": "abort", "p40": "abort", "p5": "length"
    }  # fmt: skip
    assert all(len(sampled(answers[rid])[0]) < NUM_LONG for rid in ("p4", "p40"))


async def test_the_completions_of_a_batch_are_aborted_by_their_own_names() -> None:
    running = asyncio.create_task(engine("a").generate([PROMPT, PROMPT], LONG, rid="both"))
    await engine("a").until_running(2)
    await engine("a").call("/abort_request", {"rid": "both"})  # nobody's name
    await engine("a").call("/abort_request", {"rid": "both_1"})
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in await running]
    assert reasons == ["length", "abort"]


async def test_what_is_aborted_while_it_waits_lacks_fields() -> None:
    rids = [f"wait-{index:03d}" for index in range(100)]
    running = asyncio.create_task(engine("a").generate([PROMPT] * 100, LONGEST, rid=rids))
    await engine("a").until_running(8)
    await engine("a").call("/abort_request", {"abort_all": True})
    by_reason: dict[str, list[Any]] = {}
    for answer in await running:
        by_reason.setdefault(answer["meta_info"]["finish_reason"]["message"], []).append(answer)
    assert by_reason.keys() == {ABORTED["message"], ABORTED_WAITING["message"]}
    for answer in by_reason[str(ABORTED_WAITING["message"])]:
        assert sampled(answer) == ([], []) and answer["meta_info"]["finish_reason"] == ABORTED_WAITING
        assert not {"prompt_tokens", "cached_tokens"} & answer["meta_info"].keys()
        assert answer["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 0}]
    for answer in by_reason[str(ABORTED["message"])]:
        assert len(sampled(answer)[0]) > 0 and answer["meta_info"]["prompt_tokens"] == len(PROMPT)


async def test_what_is_aborted_while_retracted_answers_at_once() -> None:
    """With no more tokens than it had: SGLang knows them up to the last multiple of 50 only."""
    running = await started(LONGEST, rid="mine")
    await pause("retract")
    await engine("a").call("/abort_request", {"rid": "mine"})
    answer = await running  # while the engine is still paused
    assert answer["meta_info"]["finish_reason"] == ABORTED_WAITING and len(sampled(answer)[0]) < NUM_LONGEST
    check_logprobs(answer, [tiny_model(0)])


async def test_a_live_rid_is_not_given_twice() -> None:
    running = await started(LONG, rid="mine")
    status, answer = await engine("a").call("/generate", {"input_ids": PROMPT, "rid": "mine"})
    assert status == 400 and "mine" in answer["error"]["message"]
    assert (await running)["meta_info"]["finish_reason"]["type"] == "length"
    assert (await engine("a").generate(PROMPT, {"max_new_tokens": 1}, rid="mine"))["meta_info"]["id"] == "mine"


async def test_a_caller_that_goes_away_frees_its_slots() -> None:
    body = {"input_ids": [PROMPT] * 300, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        gone = asyncio.create_task(session.post(engine("a").url + "/generate", json=body))
        await engine("a").until_running(8)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
    await engine("a").until_idle()


async def test_reload_changes_weights_version_and_checksum() -> None:
    before, before_all = await checksums()
    await engine("a").reload(tiny_model(1), "2")
    answer = await engine("a").generate(PROMPT, {"max_new_tokens": 16, "ignore_eos": True})
    assert answer["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 16}]
    # the embeddings are tied: a head left behind would be seen here
    check_logprobs(answer, [tiny_model(1)])
    _, model = await engine("a").get("/model_info")
    assert (model["weight_version"], model["model_path"]) == ("2", str(tiny_model(1)))
    after, after_all = await checksums()
    assert after.keys() == before.keys() and "lm_head.weight" not in after and after_all != before_all
    assert after["model.embed_tokens.weight"] != before["model.embed_tokens.weight"]
    await engine("a").reload(tiny_model(0), "3")
    assert await checksums() == (before, before_all)
    check_logprobs(await engine("a").generate(PROMPT, {"max_new_tokens": 16, "ignore_eos": True}), [tiny_model(0)])


async def test_an_update_without_a_version_keeps_the_label() -> None:
    status, _ = await engine("a").call("/update_weights_from_disk", {"model_path": str(tiny_model(1))})
    assert status == 200 and (await engine("a").get("/model_info"))[1]["weight_version"] == "1"
    check_logprobs(await engine("a").generate(PROMPT, {"max_new_tokens": 4, "ignore_eos": True}), [tiny_model(1)])


async def test_torn_weights_never_serve(tmp_path: Path) -> None:
    """rlpipe's own engine refuses them; SGLang dies of them."""
    shutil.copytree(tiny_model(1), tmp_path / "policy")
    path = tmp_path / "policy" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with engine_of_its_own() as server:
        try:
            status, answer = await server.update(tmp_path / "policy", "2")
            assert status == 400 and answer["success"] is False
            answer = await server.generate(PROMPT, {"max_new_tokens": 4, "ignore_eos": True})
        except (aiohttp.ClientError, TimeoutError):
            assert server.process.wait(timeout=DEADLINE_S) != 0
        else:
            assert answer["meta_info"]["weight_version"] == "1"
            check_logprobs(answer, [tiny_model(0)])
