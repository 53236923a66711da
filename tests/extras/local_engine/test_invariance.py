"""A request with a seed has the same tokens and the same bits of its logprobs whatever runs beside
it, in any order, anywhere."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlpipe.config.model import Dtype
from rlpipe.extras.local_engine.model import PROOFS, LocalModel, StepShape
from rlpipe.extras.local_engine.protocol import ModelLimits, parse_generate
from rlpipe.extras.local_engine.scheduler import POOLS_MAX, Scheduler
from tests.engine_fixtures import VOCAB, local_engine, sampled, tiny_model

NUM_REQUESTS = 12


@functools.cache
def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Requests of many shapes, among them groups with one prompt."""
    draw = random.Random(7)
    made: list[tuple[list[int], dict[str, Any]]] = []
    for index in range(NUM_REQUESTS):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 22, 32, 33, 130]))]
        if index % 3 == 1:
            prompt = made[-1][0]
        made.append((prompt, {
            "max_new_tokens": draw.choice([1, 5, 16, 24]), "sampling_seed": draw.getrandbits(62),
            "temperature": draw.choice([0, 0.6, 1.0, 1.5]), "top_p": draw.choice([1.0, 1.0, 0.9]),
            "top_k": draw.choice([-1, -1, 20]), "ignore_eos": draw.random() < 0.5,
        }))  # fmt: skip
    return made


@functools.cache
def local_model(device: str, dtype: Dtype = "float32") -> LocalModel:
    with torch.inference_mode():
        return LocalModel(str(tiny_model(0)), device, dtype=dtype)


def run_together(chosen: list[int], device: str, dtype: Dtype, late: int = 0) -> dict[int, Any]:
    """Runs requests on a scheduler of their own; the last `late`
    of them arrive after some steps."""
    scheduler = Scheduler(local_model(device, dtype), "1", torch.get_num_threads())
    calls = {}
    with torch.inference_mode():
        for place, index in enumerate(chosen):
            if place == len(chosen) - late:
                for _ in range(3):
                    scheduler.step()
            prompt, params = requests()[index]
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            calls[index] = parse_generate(body, ModelLimits(VOCAB, 512, (2,)), str(index), 0)
            scheduler.submit(calls[index])
        for _ in range(1000):
            if not scheduler.live:
                break
            scheduler.step()
    assert not scheduler.live
    return {index: (call.jobs[0].tokens, call.jobs[0].logprobs) for index, call in calls.items()}


@functools.cache
def alone(threads: int, device: str, dtype: Dtype) -> dict[int, Any]:
    assert torch.get_num_threads() == threads
    return {index: run_together([index], device, dtype)[index] for index in range(NUM_REQUESTS)}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check_orders(threads: int, device: str, dtype: Dtype, orders: list[list[int]]) -> None:
    expected = alone(threads, device, dtype)
    for order in orders:
        together = run_together(order, device, dtype, late=len(order) // 3)
        for index in order:
            assert together[index] == expected[index], f"request {index} differs in {order}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_any_order_gives_the_same_bits(threads: int, dtype: Dtype) -> None:
    orders = [random.Random(seed).sample(range(NUM_REQUESTS), NUM_REQUESTS) for seed in range(2)]
    check_orders(threads, "cpu", dtype, orders)


@pytest.mark.parametrize("dtype", get_args(Dtype))
@settings(max_examples=10, deadline=None, derandomize=True)
@given(order=st.lists(st.integers(0, NUM_REQUESTS - 1), min_size=1, unique=True))
def test_any_company_gives_the_same_bits(dtype: Dtype, order: list[int]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check_orders(1, "cpu", dtype, [order])
    finally:
        torch.set_num_threads(before)


async def test_every_engine_and_every_order_of_arrival_gives_the_same_bits() -> None:
    servers = [local_engine("a"), local_engine("b")]
    prompts, params = [list(column) for column in zip(*requests(), strict=True)]
    batch = [sampled(answer) for answer in await servers[0].generate(prompts, params)]
    single = [sampled(await servers[1].generate(prompt, how)) for prompt, how in requests()]
    assert single == batch
    order = random.Random(3).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    tasks = {index: asyncio.create_task(servers[index % 2].generate(*requests()[index])) for index in order}
    assert [sampled(await tasks[index]) for index in range(NUM_REQUESTS)] == batch


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_slots_that_become_free_change_no_bits(dtype: Dtype) -> None:
    """Of 40 jobs in one bucket most end early: the others move to the first slots, and a step has
    fewer rows."""
    draw = random.Random(1)
    bodies = [
        {"input_ids": [draw.randrange(3, VOCAB) for _ in range(20)], "return_logprob": True,
         "sampling_params": {"max_new_tokens": draw.choice([1, 2, 3, 40]), "sampling_seed": index, "ignore_eos": True}}
        for index in range(40)
    ]  # fmt: skip
    model = local_model("cpu", dtype)

    def run(chosen: list[int]) -> list[Any]:
        scheduler = Scheduler(model, "1", torch.get_num_threads())
        calls = [parse_generate(bodies[index], ModelLimits(VOCAB, 512, ()), str(index), 0) for index in chosen]
        with torch.inference_mode():
            for call in calls:
                scheduler.submit(call)
            while scheduler.live:
                scheduler.step()
        return [(call.jobs[0].tokens, call.jobs[0].logprobs) for call in calls]

    together = run([*range(40)])
    assert [run([index])[0] for index in range(40)] == together
    rows = {part.rows for _, part in model._parts}
    assert rows >= {16, 48}
    proven = {part for (_, part), proofs in model._parts.items() if PROOFS in proofs.values()}
    assert {part.used for part in proven} >= {1, 16}


def played_bits(model: LocalModel, monkeypatch: pytest.MonkeyPatch, is_off: Any) -> list[StepShape]:
    """Plays a processor on which a step of some shapes has other bits: those of the rows for which
    `is_off(shape)` gives a slice. Returns the list to which each computed shape is added."""
    step, computed = model._step, list[StepShape]()

    def played(tokens_S: Tensor, position_S: Tensor, kv: Tensor, shape: StepShape) -> Tensor:
        computed.append(shape)
        logits_SV = step(tokens_S, position_S, kv, StepShape(kv.shape[2], kv.shape[2], kv.shape[4])).clone()
        logits_SV[is_off(shape)] += 1e-3
        return logits_SV

    monkeypatch.setattr(model, "_step", played)
    return computed


def decoded(model: LocalModel, kv_N2SHLD: Tensor, position: int, used: int, length: int) -> Tensor:
    rows = -(-used // 16) * 16
    return model.decode(torch.full((rows,), 5), torch.full((rows,), position), kv_N2SHLD, used, length)[:used]


ALL, NONE = slice(None), slice(0)


@pytest.mark.parametrize("enough", [16, 32, 48, 64])
def test_where_products_of_few_rows_have_other_bits_as_many_as_it_takes_are_computed(
    enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with one request of 64 slots cost a whole step, at the whole length of its bucket."""
    with torch.inference_mode():
        model = LocalModel(str(tiny_model(0)), "cpu")
        computed = played_bits(model, monkeypatch, lambda shape: ALL if shape.rows < enough else NONE)
        kv_N2SHLD, steps = model.empty_slots(64, 512), list[list[StepShape]]()
        for position in range(16):
            computed.clear()
            logits_SV = decoded(model, kv_N2SHLD, position, 1, 64)
            steps.append([*computed])
            assert torch.equal(logits_SV, model._step(*one_token(position), kv_N2SHLD, StepShape(64, 64, 512))[:1])
        climbed = [16, 32, 48, 64].index(enough)
        assert all(StepShape(64, 64, 512) in each for each in steps[: climbed + PROOFS])
        assert all(each == [StepShape(enough, 1, 64)] for each in steps[climbed + PROOFS :])
        # known of 64 slots, whatever their bucket
        computed.clear()
        decoded(model, model.empty_slots(64, 256), 0, 1, 64)
        assert {shape.rows for shape in computed} == {enough, 64}


def one_token(position: int) -> tuple[Tensor, Tensor]:
    return torch.full((16,), 5), torch.full((16,), position)


def test_what_a_few_rows_proved_is_not_taken_for_proven_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's last rows may have other bits than its first."""
    with torch.inference_mode():
        model = LocalModel(str(tiny_model(0)), "cpu")
        played_bits(model, monkeypatch, lambda shape: slice(8, None) if shape.rows < 64 else NONE)
        kv_N2SHLD = model.empty_slots(64, 128)
        for used in (1, 4, 12, 4, 20, 40, 1):
            for position in range(PROOFS + 2):
                logits_SV = decoded(model, kv_N2SHLD, position, used, 64)
                assert (logits_SV == logits_SV[:1]).all(), used


def test_a_length_or_a_nan_that_has_other_bits_is_no_fault_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        model = LocalModel(str(tiny_model(0)), "cpu")
        computed = played_bits(model, monkeypatch, lambda shape: ALL if shape.length == 64 else NONE)
        kv_N2SHLD = model.empty_slots(64, 256)
        for position in range(PROOFS + 3):
            decoded(model, kv_N2SHLD, position, 1, 64)
        computed.clear()
        decoded(model, kv_N2SHLD, 9, 1, 64)
        assert computed == [StepShape(16, 16, 256)]
        kv_N2SHLD.fill_(torch.nan)  # as of a policy that diverged
        decoded(model, kv_N2SHLD, 80, 1, 128)
        assert model._too_few[64] == set()


def test_more_buckets_than_pools_all_get_their_turn() -> None:
    scheduler = Scheduler(local_model("cpu"), "1", torch.get_num_threads())
    limits = ModelLimits(VOCAB, 512, ())
    lengths = [10, 70, 140, 200, 260, 330, 400, 470]
    with torch.inference_mode():
        for index in range(5 * len(lengths)):
            body = {
                "input_ids": [5] * lengths[index % len(lengths)],
                "sampling_params": {"max_new_tokens": 1 + index % 3},
            }
            scheduler.submit(parse_generate(body, limits, str(index), index))
        assert len(scheduler.waiting) == len(lengths) > POOLS_MAX
        for _ in range(60):
            assert len(scheduler.pools) <= POOLS_MAX
            scheduler.step()
    assert not scheduler.live and not any(scheduler.waiting.values())


def test_without_a_seed_completions_differ() -> None:
    calls = [parse_generate({"input_ids": [1]}, ModelLimits(VOCAB, 512, (2,)), "x", seed) for seed in (5, 9)]
    assert calls[0].jobs[0].seed != calls[1].jobs[0].seed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_any_order_gives_the_same_bits_on_cuda(dtype: Dtype) -> None:
    orders = [random.Random(seed).sample(range(NUM_REQUESTS), NUM_REQUESTS) for seed in range(3)]
    check_orders(torch.get_num_threads(), "cuda", dtype, orders)
