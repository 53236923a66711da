"""What `rlpipe runs`, `show`, `compare` and `files` print of a store."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from typer.testing import CliRunner

from flows import cli
from flows.ui import _group_table
from rlpipe.base.errors import UserError
from rlpipe.base.hashing import canonical_json
from rlpipe.base.manifests import Manifest
from rlpipe.base.printable import printable
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.config.source import override_config
from rlpipe.report.curves import draw_curves
from rlpipe.report.show import (
    TABLE_COLUMNS,
    TABLE_ROWS,
    iteration_report,
    iterations_report,
    rollout_table,
    runs_report,
    trained_groups,
)
from rlpipe.store import audit, holder, lease
from rlpipe.store.approvals import approve, is_awaited
from rlpipe.store.artifacts import commit, write_bytes
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import SEAL
from rlpipe.store.limits import UNTRAINED
from rlpipe.store.opening import create_or_continue, fork
from rlpipe.store.run import Run
from rlpipe.store.run_record import record_start, start_key
from tests.deadlines import DEADLINE_S
from tests.rows import BATCH, PROMPTS, fill, to_parquet
from tests.store.test_run import commit_iterations, commit_stage, record_of, tiny


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def without_sft(store: Store, *sets: str) -> Run:
    return create_or_continue(tiny(store, "sft.num_steps=0", "rl.num_iterations=2", *sets))


def commit_rows(run: Run, iteration: int, stage: str, name: str, data: bytes) -> ArtifactRef:
    folder = run.folder("rl", iteration, stage)
    record = write_bytes(run.store, folder, "a1", name, data)
    return commit(
        run.store, folder, Manifest(run.name, "rl", iteration, stage, {}, "0", {}, [record], {}, None, "x", "t", "t")
    )[0]


def commit_iteration(run: Run, iteration: int, metrics: JsonDict, **artifacts: ArtifactRef) -> None:
    assert run.store.create(run.iteration_key(iteration), canonical_json(record_of(run, iteration, metrics, artifacts)))


def test_a_run_has_a_state_a_reward_and_the_date_of_its_newest_commit(store: Store) -> None:
    run = without_sft(store, "budget.rollout_tokens=10")
    assert runs_report(store).lines()[0].endswith("RL iterations 0/2  reward -  -  unfinished")
    held = lease.acquire(store, run.root)
    assert runs_report(store).lines()[0].endswith("  working")
    held.release()
    commit_iteration(
        run, 0, {"rollout/reward_mean": 0.25, "spent/wall_clock_s": 1.0, "spent/rollout_tokens": 10, "spent/gpu_s": 0.0}
    )
    line = runs_report(store).lines()[0]
    assert "SFT segments 0/0  RL iterations 1/2  reward 0.250  2026-03-0" in line and line.endswith(
        "  stopped by budget.rollout_tokens"
    )
    commit_iteration(run, 1, {"rollout/reward_mean": 0.5})
    assert "reward 0.500" in runs_report(store).lines()[0] and runs_report(store).lines()[0].endswith("  complete")


def test_a_run_is_as_far_as_its_last_start_plans(local: Store) -> None:
    run = without_sft(local)
    spent = {"spent/wall_clock_s": 1.0, "spent/rollout_tokens": 10, "spent/gpu_s": 0.0}
    for iteration in range(2):
        commit_iteration(run, iteration, {"rollout/reward_mean": 0.5, **spent})
    for sets, said in [
        ([], "RL iterations 2/2 .* complete"),
        (["rl.num_iterations=5"], "RL iterations 2/5 .* unfinished"),
        (["rl.num_iterations=5", "budget.rollout_tokens=10"], "RL iterations 2/5 .* stopped by budget.rollout_tokens"),
        (["rl.num_iterations=2", 'approval=["register"]'], r"RL iterations 2/2 .* waits for an approval \(register\)"),
        (["rl.num_iterations=1"], "RL iterations 2/1 .* complete"),
    ]:
        record_start(local, override_config(run.config, sets))
        assert re.search(f"{said}$", runs_report(local).lines()[0]), (sets, runs_report(local).lines())
    record_start(local, override_config(run.config, ["rl.num_iterations=5"]))
    local.put(start_key("a"), b"{}")
    assert "start.json is damaged" in runs_report(local).lines()[0]


def test_a_run_that_waits_for_a_person_says_so(local: Store) -> None:
    run = without_sft(local, 'approval=["rl", "register"]', "budget.rollout_tokens=10")
    held = lease.acquire(local, run.root)
    assert runs_report(local).lines()[0].endswith("  working")
    held.release()
    assert runs_report(local).lines()[0].endswith("  waits for an approval (rl)")
    approve(run, "rl", "a flow run")
    assert runs_report(local).lines()[0].endswith("  unfinished") and not is_awaited(run, "rl")
    spent = {"spent/wall_clock_s": 1.0, "spent/rollout_tokens": 10, "spent/gpu_s": 0.0}
    commit_iteration(run, 0, {"rollout/reward_mean": 0.25, **spent})
    assert runs_report(local).lines()[0].endswith("  waits for an approval (register)")  # of what a budget stopped
    commit_iteration(run, 1, {"rollout/reward_mean": 0.5})
    assert runs_report(local).lines()[0].endswith("  waits for an approval (register)")
    approve(run, "register", "a flow run")
    assert runs_report(local).lines()[0].endswith("  complete")


def test_a_run_whose_holder_died_is_unfinished_and_one_of_another_host_is_held(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_sft(local)
    program = (
        "from rlpipe.store import lease; from rlpipe.store.backend import open_store; import os\n"
        f"lease.acquire(open_store({local.url!r}), 'runs/a'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, check=True)
    assert runs_report(local).lines()[0].endswith("  unfinished")
    here = holder.socket.gethostname()
    monkeypatch.setattr(holder.socket, "gethostname", lambda: "elsewhere")
    assert runs_report(local).lines()[0].endswith(f"  held on {here}")


def test_a_run_of_another_version_does_not_hide_the_others(local: Store) -> None:
    without_sft(local)
    record = json.loads(local.read("runs/a/run.json"))
    record["config"]["rl"]["of_another_version"] = 1
    record["config"]["run"] = "old"
    del record[SEAL]
    local.put("runs/old/run.json", canonical_json(record))
    strange = create_or_continue(tiny(local, "run=strange", "sft.num_steps=0"))
    local.put(strange.iteration_key(0), b"{}")
    lines = runs_report(local).lines()
    assert (
        "unfinished" in lines[0]
        and "this version refuses rl.of_another_version" in lines[1]
        and "iteration.json is damaged, or of another version" in lines[2]
    )


def test_the_number_of_reads_does_not_grow_with_the_run(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = without_sft(local, "rl.num_iterations=1000")
    for iteration in range(40):
        commit_iteration(run, iteration, {"rollout/reward_mean": 0.5})
    reads: list[str] = []
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda self, key: reads.append(key) or read(self, key))
    assert "RL iterations 40/1000" in runs_report(local).lines()[0]
    assert len(reads) <= 5


def test_rollouts_are_shown_with_their_answer_whatever_round_it_is_of(store: Store) -> None:
    run = without_sft(store)
    prompts = [
        commit_rows(run, 0, f"prompts/round-{index}", "prompts.parquet",
                    to_parquet([fill({"prompt_id": f"p{index}", "answer": f"answer {index}" if index == 0 else None},
                                     PROMPTS)], PROMPTS))
        for index in range(2)
    ]  # fmt: skip
    rows = [fill({"prompt_id": f"p{group}", "group_index": group, "prompt": f"prompt {group}",
                  "completion": "<answer>x</answer>",
                  "reward": 0.5, "reward_parts": '{"exact": 1.0, "format": 0.5}', "finish_reason": "stop"}, BATCH)
            for group in range(2) for _ in range(2)]  # fmt: skip
    rows[0]["reward_fault"] = "timeout"
    batch = commit_rows(run, 0, "batch/round-1", "batch.parquet", to_parquet(rows, BATCH))
    commit_iteration(run, 0, {"rollout/reward_mean": 0.5}, prompts=prompts[-1], batch=batch)
    lines = iteration_report(run, 0, rows_max=3).lines()
    assert lines[-5] == "group 0: 'prompt 0', answer 'answer 0'"
    assert lines[-4].endswith("'<answer>x</answer>'  (exact 1, format 0.5, fault timeout)")
    record = run.iteration(0)
    assert record is not None
    shown = trained_groups(run, record)
    assert "answer: " in "\n".join(_group_table(shown[1]))  # for the UI; rows need no answer
    assert lines[-2:] == ["group 1: 'prompt 1', answer ''",
                          " 0.500      0.000  stop    '<answer>x</answer>'  (exact 1, format 0.5)"]  # fmt: skip


def test_names_and_texts_of_others_are_shown_as_escapes(local: Store) -> None:
    """In `show` of a run and of an iteration, the Prefect artifact and MLflow's table."""
    evil, safe = "a\x1b[2J\ud800\u202e", r"a\x1b[2J\ud800\u202e"
    run = without_sft(local)
    row = {
        "prompt_id": "p0",
        "prompt": "\x1b[2J",
        "completion": "\x1b[2J",
        "reward": 0.5,
        "reward_parts": json.dumps({evil: 0.5}),
    }
    prompts = to_parquet([fill({"prompt_id": "p0"}, PROMPTS)], PROMPTS)
    refs = {
        "prompts": commit_rows(run, 0, "prompts/round-0", "prompts.parquet", prompts),
        "batch": commit_rows(run, 0, "batch/round-0", "batch.parquet", to_parquet([fill(row, BATCH)], BATCH)),
        "policy": commit_stage(run, 0, "policy"),
    }
    commit_iteration(run, 0, {"rollout/reward_mean": 0.5, f"rollout/{evil}": 1.0}, **refs)
    for options in ([], ["--iteration", "0"]):
        shown = CliRunner().invoke(cli.app, ["show", "a", *options, "--store", local.url])
        assert shown.exit_code == 0 and printable(shown.output) == shown.output, shown.output
    assert f"rollout/{safe} " in shown.output and f"({safe} 0.5)" in shown.output
    assert r"\x1b[2J" in rollout_table(run, 0) and "\x1b" not in rollout_table(run, 0)
    record = run.iteration(0)
    assert record is not None
    artifact = printable("\n".join(_group_table(trained_groups(run, record)[0])))
    assert "ud800" in artifact and "\x1b" not in artifact


def test_a_table_of_rollouts_is_bounded_and_from_all_over_the_batch(local: Store) -> None:
    run = without_sft(local)
    rows = [
        fill({"prompt_id": f"p{index}", "group_index": index, "completion": 5000 * "x", "reward": 0.5}, BATCH)
        for index in range(70)
    ]
    commit_iteration(run, 0, {}, batch=commit_rows(run, 0, "batch/round-0", "batch.parquet", to_parquet(rows, BATCH)))
    header, *lines = csv.reader(rollout_table(run, 0).splitlines())
    assert header == TABLE_COLUMNS
    assert [line[0] for line in lines] == [f"p{index}" for index in range(0, 70, 3)] and len(lines) <= TABLE_ROWS
    assert {len(line[header.index("completion")]) for line in lines} == {2000}


def test_an_iteration_that_trained_nothing_has_an_empty_table_and_is_counted(local: Store) -> None:
    run = without_sft(local)
    empty = commit_rows(run, 0, "batch/round-0", "batch.parquet", to_parquet([], BATCH))
    commit_iteration(run, 0, {UNTRAINED: 1, "rollout/reward_mean": 0.0}, batch=empty)
    assert rollout_table(run, 0).splitlines() == [",".join(TABLE_COLUMNS)]
    assert iterations_report(run).lines()[1] == "nothing was trained in 1 of 1 iterations"
    commit_iteration(run, 1, {UNTRAINED: 2, "rollout/reward_mean": 0.0}, batch=empty)
    assert runs_report(local).lines()[0].endswith("  trained nothing")


def asked(store: Store, *arguments: str, code: int = 0) -> JsonDict:
    """The JSON document of a command, which is all that it prints."""
    ended = CliRunner().invoke(cli.app, [*arguments, "--json", "--store", store.url])
    assert ended.exit_code == code and ended.stdout.isascii() and ended.stdout.count("\n") == 1, ended.output
    return json.loads(ended.stdout)


def test_runs_and_show_as_json_have_numbers_and_all_metrics(local: Store) -> None:
    run = without_sft(local)
    metrics = {"rollout/reward_mean": 0.25, "spent/cost": 1.5, "evaluation/words_greedy": 0.5}
    commit_iteration(run, 0, metrics)
    local.put("runs/old/run.json", b"{}")
    report = asked(local, "runs")
    (summary,) = report["runs"]
    assert (summary["run"], summary["state"], summary["reward"]) == ("a", "unfinished", 0.25)
    assert (summary["iterations"], summary["num_iterations"], summary["segments"]) == (1, 2, 0)
    assert summary["best"] == {"iteration": 0, "reward": 0.25} and summary["ended_at"].startswith("20")
    assert report["store"] == local.url and list(report["unread"]) == ["old"]
    report = asked(local, "show", "a")
    (iteration,) = report["iterations"]
    assert iteration["metrics"] == metrics and iteration["weight_version"] == 1 and not iteration["is_pruned"]
    assert report["untrained"] == {"num": 0, "of": 1} and report["evaluations"] == {"1": {"words_greedy": 0.5}}


def test_an_iteration_as_json_has_its_rollouts_whatever_is_in_them(local: Store) -> None:
    run, evil = without_sft(local), "a\x1b[2J\x7f\u202e\u20ac"
    row = {"prompt_id": "p0", "prompt": "say", "completion": evil, "reward": 0.5, "reward_parts": '{"exact": 1.0}'}
    prompts = to_parquet([fill({"prompt_id": "p0", "answer": "yes"}, PROMPTS)], PROMPTS)
    refs = {
        "prompts": commit_rows(run, 0, "prompts/round-0", "prompts.parquet", prompts),
        "batch": commit_rows(run, 0, "batch/round-0", "batch.parquet", to_parquet([fill(row, BATCH)] * 3, BATCH)),
    }
    commit_iteration(run, 0, {"rollout/reward_mean": 0.5}, **refs)
    report = asked(local, "show", "a", "--iteration", "0", "--rows", "2")
    (group,) = report["groups"]
    assert (group["prompt"], group["answer"], len(group["rollouts"])) == ("say", "yes", 2)
    rollout = group["rollouts"][0]
    assert (rollout["completion"], rollout["reward"], rollout["reward_parts"]) == (evil, 0.5, {"exact": 1.0})
    assert rollout["turns"] == [{"role": "assistant", "content": evil}]
    ended = CliRunner().invoke(cli.app, ["show", "a", "--iteration", "7", "--json", "--store", local.url])
    assert (ended.exit_code, ended.stdout) == (2, "") and "--iteration 7: not committed" in ended.stderr


def test_verify_as_json_counts_artifacts_and_has_every_fault(local: Store) -> None:
    run = without_sft(local)
    commit_iterations(run, 2)
    report = asked(local, "verify", "a")
    assert report == {"run": "a", "artifacts": 2, "faults": []}
    local.put(audit.files(run, "policy")[0], b"other bytes")
    report = asked(local, "verify", "a", code=1)
    assert len(report["faults"]) == 1 and "policy" in report["faults"][0]


def test_files_are_those_of_manifests_in_order_and_a_forks_are_its_parents_first(store: Store) -> None:
    parent = create_or_continue(tiny(store))
    commit_iterations(parent, 4)
    for index in (10, 2):
        commit_stage(parent, 1, f"scores/round-{index}")
    lost = write_bytes(store, parent.folder("rl", 1, "scores/round-2"), "lost", "data.bin", b"of an attempt that died")
    child = fork(parent, 2, override_config(parent.config, ["run=b"]))
    commit_iterations(child, 4, first=3)
    assert audit.files(child, "scores") == [f"runs/a/rl/00001/scores/round-{index}/a1/data.bin" for index in (2, 10)]
    assert store.exists(f"runs/a/rl/00001/scores/round-2/{lost.name}")
    assert audit.files(child, "policy") == [f"runs/{owner}/rl/0000{iteration}/policy/a1/data.bin"
                                            for iteration, owner in enumerate("aaab")]  # fmt: skip
    with pytest.raises(UserError, match=r"run b has no files of kind 'score'; it has: policy, scores"):
        audit.files(child, "score")


def test_the_picture_of_one_iteration_shows_it(local: Store, tmp_path: Path) -> None:
    """One point is a dot, and one iteration's seconds are a bar: neither is a line."""
    run = without_sft(local)
    commit_iteration(run, 0, {"rollout/reward_mean": 0.5, "time/train_s": 3.0, "rollout/length_tokens_mean": 7.0})
    draw_curves(run, 1, tmp_path / "curves.png")
    image = matplotlib.image.imread(tmp_path / "curves.png")[..., :3]
    is_coloured = (image.max(axis=2) - image.min(axis=2)) > 0.3
    middle_of_reward, seconds = is_coloured[147:187, 602:642], is_coloured[320:, 820:1180]
    assert middle_of_reward.sum() > 20 and seconds.sum() > 5_000, (middle_of_reward.sum(), seconds.sum())
