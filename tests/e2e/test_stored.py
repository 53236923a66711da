"""Training without an engine: an iteration redone from what is stored, and
whole runs on stored rollouts."""

from __future__ import annotations

import hashlib
import io
import json
import tomllib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe.extras.plan.cost import disk_of
from rlpipe.extras.plan.sizes import ModelSizes
from rlpipe.store.artifacts import find
from rlpipe.store.opening import open_existing
from rlpipe.stored.redo import stored_rounds
from tests.paths import ROOT
from tests.pipeline import MINI, Folder, kill_group, read_record
from tests.rows import ROLLOUTS, SCORES, read_rows, to_parquet

pytestmark = pytest.mark.e2e
ITERATIONS = 3
AT = ITERATIONS - 1
TINY = ROOT / "flows" / "presets" / "tiny.toml"


def inline(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(entry)}" for key, entry in value.items()) + "}"
    return "[" + ", ".join(map(inline, value)) + "]" if isinstance(value, list) else json.dumps(value)


def data_sets(*uses: str) -> str:
    entries = tomllib.loads(TINY.read_text())["data"]
    return "data=" + inline([{**entry, "rows_max": 400} for entry in entries if entry["use"] in uses])


# no evaluation set: only generate needs an engine. Two sampling rounds an iteration: 8 groups are
# never the 16 that are enough, nor are 16 more than are trained
SOURCE = [*(each for each in MINI if not each.startswith("data.")), data_sets("sft", "rl"),
          f"rl.num_iterations={ITERATIONS}",
          "rl.filters={diversity = 0.9}", "rl.rounds_max=2", "rl.groups_min=16",
          "rl.rewards={exact = 0.5, reasoning_gym = 0.5, format = 0.1}"]  # fmt: skip
LENGTH = 'rl.rewards={"graders:length" = 1.0}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Folder:
    """A working directory whose store has run a."""
    path = tmp_path_factory.mktemp("stored")
    (path / "graders.py").write_text("def length(prompt, completion):\n    return float(len(completion))\n")
    folder = Folder(path, f"file://{path}/store", prefect_api)
    folder.complete("a", *SOURCE)
    assert engine_files(folder, "a")
    return folder


def fork(folder: Folder, new: str, redo: str, *sets: str, run: str = "a") -> list[str]:
    overrides = [part for each in sets for part in ("--set", each)]
    return ["fork", run, "--at", str(AT), "--run", new, "--redo", redo, *overrides, "--store", folder.store]


def engine_files(folder: Folder, run: str) -> list[str]:
    """What an engine leaves on this machine: logs, and weights that it was given."""
    (work_dir,) = (folder.path / ".rlpipe").glob(f"{run}-*")
    assert (work_dir / "trainer.log").is_file()
    return [path.name for path in work_dir.rglob("*") if "engine" in path.name or path.parent.name == "weights"]


def test_a_run_that_ended_leaves_its_logs_here_and_no_copies(folder: Folder) -> None:
    (work_dir,) = (folder.path / ".rlpipe").glob("a-*")
    assert {path.suffix for path in work_dir.rglob("*") if path.is_file()} == {".log"}


def test_the_store_takes_about_what_a_plan_says(folder: Folder) -> None:
    run = open_existing(folder.open_store(), "a")
    weights = next(
        file for file in run.committed("base", 0, "policy")[1].files if file.plain_name == "model.safetensors"
    )
    planned = disk_of(run.config, ModelSizes(weights.bytes // 4, layer=1, rest=1, kv_token=1, microbatch=None))
    taken = sum(path.stat().st_size for path in (folder.path / "store" / "runs" / "a").rglob("*") if path.is_file())
    assert 0.8 < taken / planned.total < 1.1


def metrics_of(folder: Folder, run: str, iteration: int = AT) -> dict[str, float]:
    metrics = read_record(folder, run, iteration)["metrics"]
    assert isinstance(metrics, dict)
    return metrics


def assert_whole(folder: Folder, run: str) -> None:
    code, output = folder.rlpipe("verify", run, "--store", folder.store)
    assert code == 0, output
    assert "0 files no manifest names" in folder.rlpipe("gc", run, "--store", folder.store)[1]


def stages_of(folder: Folder, run: str) -> set[str]:
    keys = folder.open_store().list(f"runs/{run}/rl")
    return {key.split("/")[4] for key in keys if key.endswith("manifest.json")}


def digest_of(folder: Folder, run: str) -> str:
    """Of every file of a run, but who holds it."""
    store = folder.open_store()
    keys = [key for key in store.list(f"runs/{run}") if "/lease/" not in key]
    return hashlib.sha256(b"".join(key.encode() + store.read(key) for key in keys)).hexdigest()


@pytest.mark.parametrize(
    ("redo", "own"),
    [
        pytest.param("train", {"gap", "policy"}, marks=pytest.mark.nightly),
        pytest.param("filter", {"batch", "gap", "policy"}, marks=pytest.mark.nightly),
        ("score", {"scores", "batch", "gap", "policy"}),
    ],
)
def test_redone_with_the_same_settings_it_is_the_same_to_the_bit(folder: Folder, redo: str, own: set[str]) -> None:
    new = f"same-{redo}"
    code, output = folder.rlpipe(*fork(folder, new, redo))
    assert code == 0, output[-3000:]
    assert stages_of(folder, new) - {"state"} == own
    assert folder.final_sha256(new, ITERATIONS) == folder.final_sha256("a", ITERATIONS)
    assert engine_files(folder, new) == []
    assert_whole(folder, new)


@pytest.mark.nightly
def test_redone_otherwise_it_differs_survives_a_kill_goes_on_and_can_be_redone_itself(folder: Folder) -> None:
    parent = digest_of(folder, "a")
    process = folder.start(*fork(folder, "other", "score", LENGTH, "rl.learning_rate=0.001"))
    folder.wait_for("other", f"rl/{AT:05d}/scores/round-0/manifest.json", process)
    kill_group(process)
    code, output = folder.rlpipe(*fork(folder, "other", "score", LENGTH, "rl.learning_rate=0.001"))
    assert code == 0, output[-3000:]
    assert "* rollout/reward_length_mean" in output
    assert "* rollout/reward_mean" in output
    assert "  rollout/length_tokens_mean" not in output
    assert engine_files(folder, "other") == []
    assert folder.final_sha256("other", ITERATIONS) != folder.final_sha256("a", ITERATIONS)
    assert metrics_of(folder, "other")["rollout/num_tokens"] == metrics_of(folder, "a")["rollout/num_tokens"]
    # wanting more groups than are stored samples no third round, and the
    # stored scores are the redone ones
    code, output = folder.rlpipe(*fork(folder, "again", "filter", "rl.rounds_max=9", "rl.groups_min=99", run="other"))
    assert code == 0, output[-3000:]
    assert (metrics_of(folder, "again")["rollout/rounds"], stages_of(folder, "again") - {"state"}) == (
        2,
        {"batch", "gap", "policy"},
    )
    assert metrics_of(folder, "again")["rollout/reward_mean"] == metrics_of(folder, "other")["rollout/reward_mean"]
    folder.complete("other", *SOURCE, LENGTH, "rl.learning_rate=0.001", f"rl.num_iterations={ITERATIONS + 1}")
    assert "rollouts" in stages_of(folder, "other")  # of the iteration after the redone one
    assert "redoes score of 2" in folder.rlpipe("runs", "--store", folder.store)[1]
    assert (
        folder.rlpipe("gc", "other", "--delete", "--store", folder.store)[0] == 0
    )  # what the kill cut off, if it was writing
    for run in ("other", "again"):
        assert_whole(folder, run)
    assert digest_of(folder, "a") == parent


def test_a_redo_that_would_change_what_it_shares_is_refused(folder: Folder) -> None:
    for redo, override, needle in (
        ("filter", LENGTH, "shares scores, so rl.rewards cannot change"),
        ("train", "rl.num_iterations=9", "leave out rl.num_iterations"),
    ):
        code, output = folder.rlpipe(*fork(folder, "refused", redo, override))
        assert code == 2, output
        assert needle in output
    assert not folder.open_store().exists("runs/refused/run.json")


@pytest.mark.nightly
def test_fed_from_another_run_with_equal_settings_every_policy_is_the_same_to_the_bit(folder: Folder) -> None:
    fed = [*SOURCE, "rl.rollouts_from=run:a"]
    code, output = folder.rlpipe(*folder.run_arguments("fed", *fed, "stop.proximal_kl_max=1e-12"))
    assert code == 3 and "1 of 3 iterations are committed" in output, output[-3000:]
    folder.complete("fed", *fed)
    for version in range(ITERATIONS + 1):
        assert folder.final_sha256("fed", version) == folder.final_sha256("a", version), f"version {version}"
    assert engine_files(folder, "fed") == []
    assert metrics_of(folder, "fed")["rollout/staleness_max"] == 0
    assert_whole(folder, "fed")
    code, output = folder.rlpipe(*folder.run_arguments("fed", *SOURCE, "rl.rollouts_from=run:a", "rl.num_iterations=9"))
    assert code == 2
    assert "has 3 whole committed iterations; 9 iterations need 9" in output


def all_rollouts(folder: Folder) -> list[dict[str, Any]]:
    """The rows of all of run a's rollouts, one iteration after the other."""
    run = open_existing(folder.open_store(), "a")
    rounds = [each for iteration in range(ITERATIONS) for each in stored_rounds(run, iteration)]
    return [
        row
        for each in rounds
        for ref in each.rollouts
        for row in read_rows(run.store, ref, "rollouts.parquet", ROLLOUTS)
    ]


@pytest.mark.nightly  # extras/imports/test_importing.py reads files without a pipeline
def test_fed_from_a_file_it_is_the_same_and_the_file_is_needed_once(folder: Folder) -> None:
    path, rows = folder.path / "rollouts.parquet", all_rollouts(folder)
    path.write_bytes(to_parquet(rows, ROLLOUTS))
    told = [*SOURCE, "rl.num_prompts=16", f"rl.rollouts_from={path}"]  # 16 groups: both rounds of an iteration of run a
    code, output = folder.rlpipe(*folder.run_arguments("filed", *told, "rl.num_iterations=7"))
    assert code == 2
    assert "has 48 whole groups; 7 iterations need 112" in output
    folder.complete("filed", *told, "rl.num_iterations=2")
    for version in range(3):
        assert folder.final_sha256("filed", version) == folder.final_sha256("a", version), f"version {version}"
    assert engine_files(folder, "filed") == []
    path.unlink()  # it was imported, and is needed no more
    code, output = folder.rlpipe("resume", "filed", "--store", folder.store, "--set", "rl.num_iterations=3")
    assert code == 0, output[-4000:]
    code, output = folder.rlpipe("resume", "filed", "--store", folder.store)  # with the 3 of the last start
    said = "run filed has already done all 3 iterations; for more iterations: rlpipe resume filed"
    assert code == 0 and f"{said} --store {folder.store} --set" in output, output
    assert folder.final_sha256("filed", 3) == folder.final_sha256("a", 3)
    assert_whole(folder, "filed")


@pytest.mark.nightly
def test_rewards_that_a_file_brings_are_kept_and_an_evaluation_starts_the_only_engine(folder: Folder) -> None:
    run = open_existing(folder.open_store(), "a")
    ref, manifest = run.policy(0)
    model = run.store.address(f"{ref.folder}/{manifest.file('config.json').name.split('/')[0]}")
    scores = find(run.store, run.folder("rl", 0, "scores/round-0"))
    assert scores is not None
    rows = read_rows(run.store, scores[0], "scores.parquet", SCORES)
    rewards = [float(index % 4) for index in range(len(rows))]
    table = pq.read_table(io.BytesIO(to_parquet(rows, SCORES))).drop_columns(
        ["loss_mask", "seed", "engine", "weight_versions"]
    )
    table = table.set_column(table.column_names.index("reward"), "reward", pa.array(rewards))
    (folder.path / "shards").mkdir()
    for name, part in (("0.parquet", table.slice(0, 16)), ("1.parquet", table.slice(16))):
        pq.write_table(part, folder.path / "shards" / name)
    folder.complete("kept", *MINI[:1], data_sets("evaluation"), "sft.num_steps=0",
                    "rl.num_iterations=2", "rl.num_prompts=4",
                    "rl.group_size=4", f"model.path={model}", "rl.rollouts_from=shards",
                    "evaluation.prompts_max=8")  # fmt: skip
    assert metrics_of(folder, "kept", 0)["rollout/reward_mean"] == 1.5
    assert metrics_of(folder, "kept", 1)["rollout/staleness_max"] == 1
    assert "evaluation/words_greedy" in metrics_of(folder, "kept", 1)
    assert engine_files(folder, "kept")
    assert stages_of(folder, "kept") == {
        "imported",
        "prompts",
        "rollouts",
        "scores",
        "batch",
        "gap",
        "policy",
        "evaluation",
    }
    assert_whole(folder, "kept")
