"""/generate over HTTP: fields, shapes, stop tokens, logprobs, refusals, keys. Branches only on what /server_info reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine_fixtures import ADMIN_KEY, API_KEY, CONTEXT_TOKENS, VOCAB, engine, reference_logprobs, sampled, tiny_model

PROMPT = [5, 17, 200, 3, 44]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
TOLERANCE = 5e-5


async def test_single_request_answers_one_object_with_all_fields() -> None:
    answer = await engine("a").generate(PROMPT, {"max_new_tokens": 6, "ignore_eos": True}, rid="single")
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 6 and answer["text"] == ""
    assert meta["id"] == "single" and meta["prompt_tokens"] == len(PROMPT) and meta["e2e_latency"] > 0
    assert meta["finish_reason"] == {"type": "length", "length": 6} and meta["weight_version"] == "1"
    assert meta["weight_versions"] == [["1", 6]]
    assert all(len(triple) == 3 and triple[2] is None and triple[0] <= 0 for triple in meta["output_token_logprobs"])


async def test_without_return_logprob_there_are_none() -> None:
    status, answer = await engine("a").call("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
    assert status == 200 and "output_token_logprobs" not in answer["meta_info"]


async def test_batches_answer_lists_in_order() -> None:
    prompts = [[token, 9, 11] for token in range(3, 40)]
    together = await engine("a").generate(
        prompts, [{**GREEDY, "max_new_tokens": 1 + index % 5} for index in range(len(prompts))]
    )
    assert [len(answer["output_ids"]) for answer in together] == [1 + index % 5 for index in range(len(prompts))]
    alone = await engine("a").generate(prompts[7], GREEDY)
    assert alone["output_ids"][:3] == together[7]["output_ids"]
    assert isinstance(await engine("a").generate([PROMPT], GREEDY), list)


async def test_n_answers_different_completions() -> None:
    answers = await engine("a").generate(PROMPT, {"max_new_tokens": 12, "n": 4, "sampling_seed": 3, "ignore_eos": True})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4
    assert len({answer["meta_info"]["id"] for answer in answers}) == 4


async def test_a_batch_of_many_hundred_requests_is_answered() -> None:
    prompts = [[3 + index % 300, 7, 1 + index % 5] for index in range(600)]
    answers = await engine("a").generate(prompts, {"max_new_tokens": 2, "ignore_eos": True})
    assert [len(answer["output_ids"]) for answer in answers] == [2] * 600


async def test_a_matched_stop_token_stays_in_the_completion() -> None:
    tokens, _ = sampled(await engine("a").generate(PROMPT, GREEDY))
    stop = tokens[3]
    first = tokens.index(stop) + 1
    answer = await engine("a").generate(PROMPT, {**GREEDY, "stop_token_ids": [stop]})
    assert answer["output_ids"] == tokens[:first]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    later = await engine("a").generate(PROMPT, {**GREEDY, "stop_token_ids": [stop], "min_new_tokens": 6})
    assert len(later["output_ids"]) >= 6 and stop not in later["output_ids"][:6]


async def test_the_models_own_eos_stops_unless_ignored() -> None:
    prompts = [[3 + index % 300, 40 + index // 300] for index in range(400)]
    params = {"max_new_tokens": 16, "temperature": 2.0}
    stopped = await engine("a").generate(prompts, [{**params, "sampling_seed": index} for index in range(400)])
    reasons = [answer["meta_info"]["finish_reason"] for answer in stopped]
    assert {"type": "stop", "matched": 2} in reasons
    assert all(2 not in answer["output_ids"][:-1] for answer in stopped)
    ignored = await engine("a").generate(
        prompts, [{**params, "sampling_seed": index, "ignore_eos": True} for index in range(400)]
    )
    assert all(len(answer["output_ids"]) == 16 for answer in ignored)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}])
async def test_logprobs_equal_transformers_full_forward(params: dict[str, Any]) -> None:
    prompts = [list(range(3, 3 + length)) for length in (1, 22, 33, 70)]
    answers = await engine("a").generate(prompts, {"max_new_tokens": 20, "ignore_eos": True, **params})
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logprobs = sampled(answer)
        expected = reference_logprobs(tiny_model(0), prompt, tokens, params.get("temperature", 1.0) or 1.0)
        torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), expected, atol=TOLERANCE, rtol=0)


async def test_a_given_completion_is_scored() -> None:
    prompt, completion = [9, 8, 7, 6], list(range(100, 150))
    answer = await engine("a").generate(
        prompt + completion, {"max_new_tokens": 0, "temperature": 0}, logprob_start_len=len(prompt) - 1
    )
    triples = answer["meta_info"]["input_token_logprobs"]
    assert triples[0][0] is None and [triple[1] for triple in triples] == [prompt[-1], *completion]
    expected = reference_logprobs(tiny_model(0), prompt, completion)
    scored = torch.tensor([triple[0] for triple in triples[1:]], dtype=torch.float64)
    torch.testing.assert_close(scored, expected, atol=TOLERANCE, rtol=0)


async def test_top_k_and_top_p_keep_what_they_should() -> None:
    best = (await engine("a").generate(PROMPT, {**GREEDY, "max_new_tokens": 1}))["output_ids"]
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        params = [{"max_new_tokens": 1, "sampling_seed": seed, "temperature": 3.0, **narrow} for seed in range(50)]
        answers = await engine("a").generate([PROMPT] * 50, params)
        assert all(answer["output_ids"] == best for answer in answers)


REFUSED = {
    "no input_ids": {},
    "empty": {"input_ids": []},
    "empty in a batch": {"input_ids": [[1, 2], []]},
    "out of vocabulary": {"input_ids": [1, VOCAB]},
    "negative token": {"input_ids": [-1]},
    "no integer": {"input_ids": [1.5]},
    "a bool": {"input_ids": [True]},
    "too long": {"input_ids": [1] * 500, "sampling_params": {"max_new_tokens": CONTEXT_TOKENS - 499}},
    "temperature": {"input_ids": [1], "sampling_params": {"temperature": -0.1}},
    "top_p 0": {"input_ids": [1], "sampling_params": {"top_p": 0.0}},
    "top_p 2": {"input_ids": [1], "sampling_params": {"top_p": 2}},
    "top_k": {"input_ids": [1], "sampling_params": {"top_k": -2}},
    "n": {"input_ids": [1], "sampling_params": {"n": 0}},
    "max_new_tokens": {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
    "min over max": {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
    "unknown key": {"input_ids": [1], "sampling_params": {"temprature": 1}},
    "params of another length": {"input_ids": [[1], [2]], "sampling_params": [{}]},
    "rids of another length": {"input_ids": [[1], [2]], "rid": ["a"]},
    "same rids": {"input_ids": [[1], [2]], "rid": ["a", "a"]},
    "streaming": {"input_ids": [1], "stream": True},
    "a list": [1, 2],
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
async def test_bad_requests_are_refused_with_a_message_and_the_engine_goes_on(body: Any) -> None:
    status, answer = await engine("a").call("/generate", body)
    assert status == 400 and answer["error"]["message"]
    assert (await engine("a").get("/health"))[0] == 200


async def test_each_call_takes_only_its_key() -> None:
    server = engine("a")
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert [(await server.call("/generate", body, key))[0] for key in (API_KEY, ADMIN_KEY, "", "x")] == [200, 401, 401, 401]
    for path in ("/continue_generation", "/flush_cache", "/weights_checker"):
        answers = [await server.call(path, {"action": "checksum"}, key) for key in (ADMIN_KEY, API_KEY, "")]
        assert [status for status, _ in answers] == [200, 401, 401]
    for path in ("/health", "/ready", "/health_generate"):
        assert (await server.call(path, key="", method="GET"))[0] == 200
    assert (await server.call("/model_info", key="", method="GET"))[0] == 401


async def test_the_server_says_what_it_is() -> None:
    _, model = await engine("a").get("/model_info")
    _, server = await engine("a").get("/server_info")
    assert model["is_generation"] is True and {"model_path", "tokenizer_path", "weight_version"} <= model.keys()
    assert server["context_length"] == CONTEXT_TOKENS and server["max_running_requests"] > 0 and server["version"]
    assert server["enable_deterministic_inference"] is True
