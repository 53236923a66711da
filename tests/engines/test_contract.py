"""/generate over HTTP: fields, shapes, stop tokens, logprobs, lengths, refusals, keys.

One contract, every engine.

Runs against the engine that RLPIPE_TEST_ENGINE names; what holds for rlpipe's own engine
only is in extras/local_engine/test_local.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.engine_fixtures import ADMIN_KEY, API_KEY, CONTEXT_TOKENS, engine, reference_logprobs, sampled, tiny_model

pytestmark = pytest.mark.contract
PROMPT = [5, 17, 200, 3, 44]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
TOLERANCE = 5e-5
CONTROL = ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/weights_checker")


async def test_single_request_answers_one_object_with_all_fields() -> None:
    answer = await engine("a").generate(PROMPT, {"max_new_tokens": 6, "ignore_eos": True}, rid="single")
    assert answer.keys() == {"output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 6
    assert meta["id"] == "single" and meta["prompt_tokens"] == len(PROMPT) and meta["e2e_latency"] > 0
    assert 0 <= meta["cached_tokens"] <= len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 6} and meta["weight_version"] == "1"
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 6}]
    assert all(len(triple) == 3 and triple[2] is None and triple[0] <= 0 for triple in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []


async def test_without_return_logprob_there_are_none() -> None:
    status, answer = await engine("a").call("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
    assert status == 200 and not {"output_token_logprobs", "input_token_logprobs"} & answer["meta_info"].keys()


async def test_no_new_tokens_are_an_empty_completion() -> None:
    answer = await engine("a").generate(PROMPT, {"max_new_tokens": 0})
    assert sampled(answer) == ([], []) and answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 0}]


async def test_batches_answer_lists_in_order() -> None:
    prompts = [[token, 9, 11] for token in range(3, 40)]
    lengths = [1 + index % 5 for index in range(len(prompts))]
    together = await engine("a").generate(prompts, [{**GREEDY, "max_new_tokens": length} for length in lengths])
    assert [len(answer["output_ids"]) for answer in together] == lengths
    alone = await engine("a").generate(prompts[7], GREEDY)
    assert alone["output_ids"][: lengths[7]] == together[7]["output_ids"]
    assert isinstance(await engine("a").generate([PROMPT], GREEDY), list)


async def test_the_completions_of_a_batch_are_named() -> None:
    given = await engine("a").generate([PROMPT, [1]], GREEDY, rid=["left", "right"])
    made = await engine("a").generate([PROMPT, [1]], GREEDY, rid="both")
    assert [answer["meta_info"]["id"] for answer in (*given, *made)] == ["left", "right", "both_0", "both_1"]


async def test_n_answers_different_completions_prompt_by_prompt() -> None:
    answers = await engine("a").generate(
        [PROMPT, [9]], {"max_new_tokens": 12, "n": 4, "ignore_eos": True}, rid=["p", "q"]
    )
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 8
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [5] * 4 + [1] * 4
    assert len({answer["meta_info"]["id"] for answer in answers} - {"p", "q"}) == 8  # nobody outside knows these names


async def test_a_batch_of_many_hundred_requests_is_answered() -> None:
    prompts = [[3 + index % 300, 7, 1 + index % 5] for index in range(600)]
    answers = await engine("a").generate(prompts, {"max_new_tokens": 2, "ignore_eos": True})
    assert [len(answer["output_ids"]) for answer in answers] == [2] * 600


async def test_a_matched_stop_token_stays_in_the_completion() -> None:
    tokens, _ = sampled(await engine("a").generate(PROMPT, GREEDY))
    stop = tokens[3]
    params = {"max_new_tokens": 8, "temperature": 0, "stop_token_ids": [stop]}
    answer = await engine("a").generate(PROMPT, params)
    assert sampled(answer)[0] == tokens[: tokens.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    unstopped = await engine("a").generate(PROMPT, {**params, "ignore_eos": True})
    assert sampled(unstopped)[0] == tokens  # ignore_eos ignores stop_token_ids too


async def test_the_models_own_eos_stops_unless_ignored() -> None:
    prompts = [[3 + index % 300, 40 + index // 300] for index in range(400)]
    params = {"max_new_tokens": 16, "temperature": 2.0}
    stopped = await engine("a").generate(prompts, [{**params, "sampling_seed": index} for index in range(400)])
    reasons = [answer["meta_info"]["finish_reason"] for answer in stopped]
    assert {"type": "stop", "matched": 2} in reasons
    assert all(2 not in answer["output_ids"][:-1] for answer in stopped)
    ignored = await engine("a").generate(prompts, {**params, "ignore_eos": True})
    assert all(len(answer["output_ids"]) == 16 for answer in ignored)


async def test_a_seed_gives_the_same_completion_where_the_engine_says_so() -> None:
    _, server = await engine("a").get("/server_info")
    params = {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 7}
    first, again = [sampled(await engine("a").generate(PROMPT, params)) for _ in range(2)]
    assert (first == again) is server["enable_deterministic_inference"]


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}]
)
async def test_logprobs_equal_transformers_full_forward(params: dict[str, Any]) -> None:
    prompts = [list(range(3, 3 + length)) for length in (1, 22, 33, 70)]
    answers = await engine("a").generate(prompts, {"max_new_tokens": 20, "ignore_eos": True, **params})
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logprobs = sampled(answer)
        expected = reference_logprobs(tiny_model(0), prompt, tokens, params.get("temperature", 1.0) or 1.0)
        torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0])
async def test_a_given_completion_is_scored_at_temperature_one(temperature: float) -> None:
    prompt, completion = [9, 8, 7, 6], list(range(100, 150))
    answer = await engine("a").generate(
        prompt + completion, {"max_new_tokens": 0, "temperature": temperature}, logprob_start_len=len(prompt) - 1
    )
    assert sampled(answer) == ([], [])
    triples = answer["meta_info"]["input_token_logprobs"]
    assert triples[0][0] is None and [triple[1] for triple in triples] == [prompt[-1], *completion]
    expected = reference_logprobs(tiny_model(0), prompt, completion)
    scored = torch.tensor([triple[0] for triple in triples[1:]], dtype=torch.float64)
    torch.testing.assert_close(scored, expected, atol=TOLERANCE, rtol=0)


async def test_scoring_starts_anywhere_in_the_prompt_and_not_behind_it() -> None:
    for start in (0, 2, len(PROMPT) - 1):
        answer = await engine("a").generate(PROMPT, {"max_new_tokens": 0}, logprob_start_len=start)
        assert [triple[1] for triple in answer["meta_info"]["input_token_logprobs"]] == PROMPT[start:]
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": len(PROMPT) + 1}
    status, answer = await engine("a").call("/generate", body)
    assert status == 400 and "logprob_start_len" in answer["error"]["message"]


async def test_top_k_and_top_p_keep_what_they_should() -> None:
    best = (await engine("a").generate(PROMPT, {**GREEDY, "max_new_tokens": 1}))["output_ids"]
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        params = [{"max_new_tokens": 1, "sampling_seed": seed, "temperature": 3.0, **narrow} for seed in range(50)]
        answers = await engine("a").generate([PROMPT] * 50, params)
        assert all(answer["output_ids"] == best for answer in answers)


async def test_lengths_that_every_engine_takes() -> None:
    """A prompt of at most context - 7 and, with the completion, at most context - 2 tokens; more
    than the context is refused."""
    for prompt, new in ((CONTEXT_TOKENS - 7, 5), (CONTEXT_TOKENS - 12, 10), (CONTEXT_TOKENS - 82, 80)):
        answer = await engine("a").generate([7] * prompt, {**GREEDY, "max_new_tokens": new})
        assert len(answer["output_ids"]) == new and answer["meta_info"]["finish_reason"] == {
            "type": "length",
            "length": new,
        }
    for prompt, new in ((CONTEXT_TOKENS - 12, 13), (CONTEXT_TOKENS + 1, 1)):
        body = {"input_ids": [7] * prompt, "sampling_params": {**GREEDY, "max_new_tokens": new}}
        status, answer = await engine("a").call("/generate", body)
        assert status == 400 and str(CONTEXT_TOKENS) in answer["error"]["message"]


OUT_OF_BOUNDS = {
    "no input_ids": {},
    "empty": {"input_ids": []},
    "temperature": {"input_ids": [1], "sampling_params": {"temperature": -0.1}},
    "top_p 0": {"input_ids": [1], "sampling_params": {"top_p": 0.0}},
    "top_p 2": {"input_ids": [1], "sampling_params": {"top_p": 2}},
    "top_k -2": {"input_ids": [1], "sampling_params": {"top_k": -2}},
    "top_k 0": {"input_ids": [1], "sampling_params": {"top_k": 0}},
    "max_new_tokens": {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
    "min over max": {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
    "rids of another length": {"input_ids": [[1], [2]], "rid": ["a"]},
    "same rids": {"input_ids": [[1], [2]], "rid": ["a", "a"]},
}
WRONG_TYPE = {
    "unknown key": {"input_ids": [1], "sampling_params": {"temprature": 1}},
    "a word for a number": {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
    "a fraction for an integer": {"input_ids": [1], "sampling_params": {"max_new_tokens": 1.5}},
    "a bool for a token": {"input_ids": [True]},
}
MALFORMED = {
    "a list": [1, 2],
    "a number for a rid": {"input_ids": [1], "rid": 5},
}


@pytest.mark.parametrize("body", OUT_OF_BOUNDS.values(), ids=OUT_OF_BOUNDS)
async def test_values_out_of_bounds_are_refused_in_the_first_shape(body: Any) -> None:
    status, answer = await engine("a").call("/generate", body)
    assert status == 400 and answer.keys() == {"error"} and answer["error"].keys() == {"message"}
    assert answer["error"]["message"]


@pytest.mark.parametrize("body", WRONG_TYPE.values(), ids=WRONG_TYPE)
async def test_wrong_types_and_unknown_sampling_params_are_refused_in_the_second_shape(body: Any) -> None:
    status, answer = await engine("a").call("/generate", body)
    assert status == 400 and answer.keys() == {"error"} and isinstance(answer["error"], str) and answer["error"]


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_bodies_are_refused_in_the_third_shape(body: Any) -> None:
    status, answer = await engine("a").call("/generate", body)
    assert status == 400 and answer["object"] == "error" and answer["message"] and answer["code"] == 400


async def test_after_refusals_the_engine_goes_on() -> None:
    for body in itertools.chain(OUT_OF_BOUNDS.values(), WRONG_TYPE.values(), MALFORMED.values()):
        assert (await engine("a").call("/generate", body))[0] == 400
    assert (await engine("a").get("/health"))[0] == 200
    assert len((await engine("a").generate(PROMPT, GREEDY))["output_ids"]) == 8


async def test_each_call_takes_only_its_key() -> None:
    server = engine("a")
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert [(await server.call("/generate", body, key))[0] for key in (API_KEY, ADMIN_KEY, "", "x")] == [
        200,
        401,
        401,
        401,
    ]
    for path in CONTROL:
        answers = [await server.call(path, {}, key) for key in (API_KEY, "", "x")]
        assert answers == [(401, {"error": "Unauthorized"})] * 3
    for path in ("/flush_cache", "/weights_checker", "/continue_generation", "/abort_request"):
        assert (await server.call(path, {}, ADMIN_KEY))[0] == 200
    for path in ("/model_info", "/server_info", "/v1/loads"):
        assert [(await server.call(path, key=key, method="GET"))[0] for key in (API_KEY, ADMIN_KEY, "")] == [
            200,
            401,
            401,
        ]
    for path in ("/health", "/ready"):
        assert (await server.call(path, key="", method="GET"))[0] == 200


async def test_the_server_says_what_it_is() -> None:
    _, model = await engine("a").get("/model_info")
    _, server = await engine("a").get("/server_info")
    assert (
        model["is_generation"] is True and model["model_path"] == str(tiny_model(0)) and model["weight_version"] == "1"
    )
    assert model["tokenizer_path"] == str(tiny_model(0)) and model["architectures"] == ["Qwen3ForCausalLM"]
    assert server["context_length"] == CONTEXT_TOKENS and server["version"] and server["weight_version"] == "1"
    assert isinstance(server["enable_deterministic_inference"], bool)
    assert (await engine("a").get("/get_weight_version"))[0] == 404
