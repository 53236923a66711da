"""What a plan says of processes, of their work, and of GPUs that trainer and engines share."""

from __future__ import annotations

import pytest

from rlpipe.config.source import read_config
from rlpipe.extras.plan.memory import GIB, memory_lines
from rlpipe.extras.plan.sizes import ModelSizes
from rlpipe.extras.plan.work import plan_lines, process_lines
from rlpipe.store.limits import gpus_held
from tests.engines.test_colocation import APART, ONE_GPU, config
from tests.paths import PRESETS


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_every_preset_is_valid_and_can_be_planned(preset: str) -> None:
    assert "rollouts" in "\n".join(plan_lines(read_config(preset, [], PRESETS)))


def test_the_plan_says_what_each_overlap_would_overlap() -> None:
    lines = plan_lines(read_config("tiny", [], PRESETS))
    first = lines.index("  overlap none: sampling and training take turns")
    assert lines[first + 1] == (
        "  overlap iteration would be: iteration k + 1 is sampled while k is trained, by the policy that k starts from"
    )
    refused = plan_lines(read_config("tiny", ["rl.oversampling=1.5"], PRESETS))
    assert any(
        line.startswith("  overlap iteration would be refused: rl.overlap='iteration': the partial rollouts")
        for line in refused
    )


def test_the_plan_says_what_an_hour_costs_and_how_long_a_budget_lasts() -> None:
    gpus = ["model.dtype=bfloat16", "trainer.gpu_ids=[0]", "engines.gpu_ids=[1, 2]", "engines.count=2"]
    price = "budget.price_per_gpu_h=2.5"
    assert plan_lines(read_config("tiny", [*gpus, price, "budget.cost=400"], PRESETS))[-1] == (
        "price: an hour of RL holds 3 GPUs and costs 7.5; budget.cost=400 lasts 53.3 h"
    )
    assert plan_lines(read_config("tiny", [*gpus, price], PRESETS))[-1].endswith("costs 7.5")
    for sets in (gpus, [price]):
        assert not any("price" in line for line in plan_lines(read_config("tiny", sets, PRESETS)))


def test_a_plan_says_what_each_side_holds_and_where_it_fits() -> None:
    sizes = ModelSizes(GIB, GIB // 8, GIB // 8, 2**14, GIB)
    *_, shared, on_24, on_48, on_80, _ = memory_lines(config(*ONE_GPU), sizes)
    assert "while training 18.25 + 3.00 that a released engine keeps = 21.25 GiB" in shared
    assert "the trainer keeps 0.70 GiB, and 12.00 GiB of the host's memory" in shared
    assert on_24.startswith("  on 24 GiB: an engine gets 0.83 of it: weights, and 587,") and on_80.startswith(
        "  on 80 GiB: an engine gets 0.86"
    )
    *_, on_24, on_48, _, _ = memory_lines(config(*ONE_GPU), ModelSizes(2 * GIB, GIB // 8, GIB // 8, 2**14, GIB))
    assert on_24 == "  on 24 GiB: does not fit" and "an engine gets 0.85" in on_48
    assert memory_lines(config(), sizes)[-1].startswith("colocated: trainer and engines take turns in this memory")
    assert not any("colocated" in line for line in memory_lines(read_config("tiny", [], PRESETS), sizes))


def test_a_plan_of_nodes_says_what_each_of_them_holds_and_that_they_run_both() -> None:
    sizes = ModelSizes(GIB, GIB // 8, GIB // 8, 2**14, GIB)
    nodes = config(*ONE_GPU, *APART)
    *_, shared, on_24, _, _, _ = memory_lines(nodes, sizes)
    # half of 12 bytes a parameter on each node; NCCL stays too
    assert "the trainer keeps 1.30 GiB, and 6.00 GiB of the memory of each of 2 hosts" in shared
    assert "while training 10.25 + 3.00 that a released engine keeps" in shared and "an engine gets 0.80 of it" in on_24
    *_, shared, _, _, _, _ = memory_lines(config(*ONE_GPU, *APART, "trainer.split_over=node"), sizes)
    assert "and 12.00 GiB of the memory of each of 2 hosts" in shared  # a whole copy
    assert [line.split(":")[0].strip() for line in process_lines(nodes)[:4]] == [
        "train node 0", "train node 1", "sampling node 0", "sampling node 1",
    ]  # fmt: skip
    assert gpus_held(nodes, "rl") == 2
