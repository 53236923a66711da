"""Over-sampling with real engines: rounds end early, what was cut short goes on in later
iterations, and a crash loses nothing."""

from __future__ import annotations

import re

import pytest

from rlpipe.base.values import JsonDict
from rlpipe.store.opening import open_existing
from tests.pipeline import MINI, Folder, kill_group, read_record
from tests.rows import BATCH, CARRIED, grouped, read_rows

pytestmark = pytest.mark.e2e
ITERATIONS = 5
# 16 groups a round, 8 at a time: when 8 have survived, others run. Completions
# are long enough to be cut short.
OVERSAMPLED = [
    *MINI, "rl.oversampling=2", "rl.staleness_max=2", "engines.in_flight_max=32", "model.context_tokens_max=512",
    "rl.completion_tokens_max=200",
]  # fmt: skip


def check_run(folder: Folder, run: str) -> tuple[list[JsonDict], list[JsonDict]]:
    """(metrics of the iterations, rows of all batches) of a complete run; its counts
    add up and its store is whole."""
    code, output = folder.rlpipe("verify", run, "--store", folder.store)
    assert code == 0, output
    assert re.search(r"\b0 faults", output), output
    found = open_existing(folder.open_store(), run)
    told: list[JsonDict] = []
    rows: list[JsonDict] = []
    num_carried = 0
    for iteration in range(ITERATIONS):
        metrics = read_record(folder, run, iteration)["metrics"]
        assert isinstance(metrics, dict)
        counts = {name: metrics[f"rollout/num_{name}"] for name in ("trained", "filtered", "carried", "expired")}
        assert metrics["rollout/num_sampled"] == sum(counts.values())
        assert metrics["rollout/num_continued"] == num_carried
        assert metrics["rollout/groups_kept"] == 8
        num_carried = counts["carried"]
        ref, manifest = found.committed("rl", iteration, "batch/round-0")
        batch = read_rows(found.store, ref, "batch.parquet", BATCH)
        assert len(batch) == counts["trained"]
        for row in batch:
            versions = [span["version"] for span in row["weight_versions"] for _ in range(span["num_tokens"])]
            assert (
                len(versions) == len(row["completion_tokens"]) == len(row["rollout_logprobs"]) == len(row["loss_mask"])
            )
            assert versions == sorted(versions)
            assert iteration - 2 <= versions[0] <= versions[-1] <= iteration
            rows.append(row | {"iteration": iteration, "versions": versions})
        if any(record.plain_name == "carried.parquet" for record in manifest.files):
            carried = read_rows(found.store, ref, "carried.parquet", CARRIED)
            assert len(grouped(carried)) == metrics["rollout/groups_carried"]
        told.append(metrics)
    return told, rows


@pytest.mark.nightly
def test_what_was_cut_short_is_continued_and_trained(folder: Folder) -> None:
    output = folder.complete("a", *OVERSAMPLED)
    told, rows = check_run(folder, "a")
    assert sum(metrics["rollout/num_carried"] for metrics in told) > 0, output[-2000:]
    assert any(len(set(row["versions"])) > 1 for row in rows)  # sampled by two weight versions
    assert all(all(row["loss_mask"]) for row in rows)
    assert folder.rlpipe("show", "a", "--iteration", "2", "--store", folder.store)[0] == 0
    # a fork that is not over-sampled trains first on what was carried: its mismatch is no fault of
    # an engine, the next one's is
    at = max(k for k, metrics in enumerate(told) if metrics["rollout/num_carried"])
    sets = ["rl.oversampling=1", f"rl.num_iterations={at + 3}", "rl.on_mismatch=fail", "rl.mismatch_max=1e-12"]
    code, output = folder.rlpipe("fork", "a", "--at", str(at), "--run", "b",
                                 *[part for each in sets for part in ("--set", each)],
                                 "--store", folder.store)  # fmt: skip
    assert code == 1, output[-3000:]
    assert f"iteration {at + 2}: engine and trainer disagree" in output
    metrics = read_record(folder, "b", at + 1)["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["rollout/num_tokens_stale"] > 0
    assert metrics["train/mismatch_abs_mean"] > 1e-12


@pytest.mark.nightly
def test_stale_tokens_can_be_context_only_and_a_kill_loses_no_rollout(folder: Folder) -> None:
    sets = [*OVERSAMPLED, "rl.train_stale_tokens=false"]
    for key in ("rl/00001/rollouts/round-0/shard-001/manifest.json", "rl/00003/scores/round-0/manifest.json"):
        process = folder.start(*folder.run_arguments("a", *sets))
        try:
            folder.wait_for("a", key, process)
        finally:
            kill_group(process)
    folder.complete("a", *sets)
    told, rows = check_run(folder, "a")
    # trainer and engine agree on what was sampled after a continuation: it went on from the very
    # tokens that are stored
    assert max(metrics["train/mismatch_abs_mean"] for metrics in told) < 1e-5
    assert any(len(set(row["versions"])) > 1 for row in rows)
    for row in rows:
        assert row["loss_mask"] == [int(version == row["iteration"]) for version in row["versions"]]
