"""`rlpipe sql`: what the views of a store hold, what they leave out, and what no query can do."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows import cli
from rlpipe.base.errors import UserError
from rlpipe.base.manifests import Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.base.values import JsonDict
from rlpipe.config.source import override_config
from rlpipe.extras.queries.queries import VIEWS, Queries
from rlpipe.store.artifacts import PRUNED, commit, write_bytes
from rlpipe.store.backend import Store, open_store
from rlpipe.store.documents import sealed
from rlpipe.store.opening import create_or_continue, fork
from rlpipe.store.run import Run
from tests.docs_blocks import ROOT
from tests.rows import BATCH, GAPS, PROMPTS, ROLLOUTS, SCORES, fill, to_parquet
from tests.store.test_run import record_of, tiny

PAGE = (ROOT / "docs" / "queries.md").read_text()
TIME = "2026-03-04T05:06:07.000+00:00"


def commit_files(
    run: Run,
    place: tuple[str, int, str],
    files: dict[str, bytes],
    metrics: JsonDict | None = None,
    version: int | None = None,
) -> ArtifactRef:
    phase, iteration, stage = place
    folder = run.folder(phase, iteration, stage)
    records = [write_bytes(run.store, folder, "a1", name, data) for name, data in files.items()]
    manifest = Manifest(
        run.name, phase, iteration, stage, {}, "0", {}, records, metrics or {}, version, "x", TIME, TIME
    )
    return commit(run.store, folder, manifest)[0]


def rows_of(iteration: int, reward: float = 1.0) -> list[JsonDict]:
    """Three groups of two: rewarded with `reward` and 0, dropped, and cut short."""
    rows = []
    for group in range(3):
        for index in range(2):
            cut = group == 2
            row = {
                "prompt_id": f"p/{group}", "group_index": group, "rollout_index": index, "prompt": f"prompt {group}",
                "completion": f"{iteration} {group} {index}", "prompt_tokens": [1, 2], "completion_tokens": [5, 6, 7],
                "loss_mask": [1, 1, 1], "rollout_logprobs": [-0.5, -0.5, -0.5], "weight_version": iteration,
                "weight_versions": [{"version": iteration - 1, "num_tokens": 1},
                                    {"version": iteration, "num_tokens": 2}],
                "finish_reason": "abort" if cut else "stop", "seed": 3, "engine": "e",
            }  # fmt: skip
            scored = reward * (1 - index) if group == 0 else 0.0
            row |= {"reward": None if cut else scored, "reward_parts": "{}" if cut else json.dumps({"exact": scored})}
            rows.append(fill(row | {"reward_fault": "timeout" if group == 1 and index else ""}, SCORES) | row)
    return rows


def only(rows: list[JsonDict], schema: object) -> bytes:
    return to_parquet([{name: row[name] for name in schema.names} for row in rows], schema)  # type: ignore[attr-defined]


def commit_sampled(run: Run, iteration: int) -> None:
    prompts = [fill({"prompt_id": f"p/{group}", "source": "p", "messages": "[]",
                     "metadata": "{}", "answer": f"answer {group}",
                     "prompt_tokens": [1, 2]}, PROMPTS) for group in range(3)]  # fmt: skip
    commit_files(run, ("rl", iteration, "prompts/round-0"), {"prompts.parquet": to_parquet(prompts, PROMPTS)})
    rows = rows_of(iteration)
    for shard, part in enumerate((rows[:4], rows[4:])):
        commit_files(
            run, ("rl", iteration, f"rollouts/round-0/shard-{shard:03d}"), {"rollouts.parquet": only(part, ROLLOUTS)}
        )


def commit_scored(run: Run, iteration: int, reward: float = 1.0) -> None:
    commit_files(run, ("rl", iteration, "scores/round-0"), {"scores.parquet": only(rows_of(iteration, reward), SCORES)})


def commit_trained(run: Run, iteration: int, advantage: float = 0.5) -> None:
    batch = [row | {"advantage": advantage * (1 - 2 * row["rollout_index"])} for row in rows_of(iteration)[:2]]
    metrics = {"dropped": {"1": "zero_std"}}
    ref = commit_files(run, ("rl", iteration, "batch/round-0"), {"batch.parquet": only(batch, BATCH)}, metrics)
    policy = commit_files(run, ("rl", iteration, "policy"), {"config.json": b"{}"}, version=iteration + 1)
    record = record_of(
        run, iteration, {"rollout/reward_mean": iteration / 4, "train/loss": 2.0}, {"batch": ref, "policy": policy}
    )
    assert run.store.create(run.iteration_key(iteration), sealed(record))


def commit_gaps(run: Run, iteration: int) -> None:
    gaps = [{"group_index": 0, "rollout_index": index, "gap": [0.25, float("nan"), -0.5]} for index in range(2)]
    commit_files(run, ("rl", iteration, "gap"), {"gap.parquet": to_parquet(gaps, GAPS)})


def commit_whole(run: Run, iteration: int) -> None:
    commit_sampled(run, iteration)
    commit_scored(run, iteration)
    commit_trained(run, iteration)


def made(store: Store) -> Run:
    """Run a: two iterations, a third under way, a pruned policy, an attempt that died; b, forked at
    0; c, which filters 1 again; s, only SFT."""
    run = create_or_continue(tiny(store, "sft.num_steps=0", "rl.num_iterations=4"))
    commit_whole(run, 0)
    commit_whole(run, 1)
    commit_sampled(run, 2)
    write_bytes(store, run.folder("rl", 1, "scores/round-0"), "died", "scores.parquet", only(rows_of(7, 100.0), SCORES))
    write_bytes(store, run.folder("rl", 2, "scores/round-0"), "died", "scores.parquet", only(rows_of(7, 100.0), SCORES))
    store.put(f"{run.folder('rl', 0, 'policy')}/{PRUNED}", b"{}")
    commit_whole(fork(run, 0, override_config(run.config, ["run=b", "rl.clip_high=0.4"])), 1)
    commit_trained(
        fork(run, 1, override_config(run.config, ["run=c", "rl.estimator='rloo'"]), "filter"), 1, advantage=9.0
    )
    commit_gaps(fork(run, 0, override_config(run.config, ["run=b", "rl.clip_high=0.4"])), 1)
    alone = create_or_continue(tiny(store, "run=s", "rl.num_iterations=0"))
    commit_files(
        alone, ("sft", 0, "policy"), {"config.json": b"{}"}, {"losses": [3.0, 2.0], "train/loss": 2.0}, version=0
    )
    evaluated = {"evaluation.parquet": only(rows_of(0)[:2], SCORES)}
    commit_files(alone, ("sft", 0, "evaluation"), evaluated, {"words_greedy": 0.25, "words_pass_at_4": 0.5}, version=0)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(f"file://{tmp_path_factory.mktemp('queries')}/store")
    made(store)
    return store


def rows(store: Store, sql: str, *names: str) -> list[tuple[object, ...]]:
    queries = Queries(store, names)
    answer = list(queries.ask(sql).rows)
    assert queries.faults == []
    return answer


def sql(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["sql", *arguments, "--store", store.url])


def test_half_of_a_surrogate_pair_ends_in_one_line(whole: Store) -> None:
    """In a query; in a name of a column, a value and JSON control characters are escapes."""
    for query in ("select '\udcff'", 'select 1 as "\ud800"', "\udcff"):
        refused = sql(whole, query)
        assert (
            refused.exit_code == 2 and "half of a surrogate pair" in refused.output and refused.output.count("\n") == 1
        )
    for kind in ("table", "csv", "json"):
        answer = sql(whole, 'select chr(27) || chr(127) || chr(8238) as "a\x1b"', "--format", kind)
        assert answer.exit_code == 0 and not re.search(r"[\x1b\x7f\u202e]", answer.output), answer.output
    assert json.loads(answer.output) == {"a\x1b": "\x1b\x7f\u202e"}


def test_what_was_scored_is_seen_once_and_nothing_of_an_attempt_that_died(store: Store) -> None:
    """On a disk and on S3."""
    made(store)
    counted = rows(
        store,
        "select run, iteration, made_by, count(*), sum(reward), count(reward) from rollouts group by all order by all",
    )
    assert counted == [
        ("a", 0, "a", 6, 1.0, 4), ("a", 1, "a", 6, 1.0, 4), ("a", 2, "a", 6, None, 0),
        ("b", 1, "b", 6, 1.0, 4), ("c", 1, "a", 6, 1.0, 4),
    ]  # fmt: skip
    assert rows(
        store, "select iteration, num_tokens, num_prompt_tokens, completion from rollouts where run = 'b' limit 1"
    ) == [(1, 3, 2, "1 0 0")]


def test_the_gap_of_every_trained_token_is_asked_for(whole: Store) -> None:
    """By the run that trained it, as all rows; of a, which older code trained, there are none."""
    counted = rows(
        whole,
        "select run, iteration, count(*), sum(len(gap)), max(list_max(list_filter(gap, lambda g: "
        "not isnan(g)))) from gaps group by all order by all",
    )
    assert counted == [("b", 1, 2, 6, 0.25)]


def test_a_rollout_says_whether_it_was_trained_and_why_not(whole: Store) -> None:
    columns = "group_index, rollout_index, trained, advantage, dropped_reason, reward_fault, reward_parts"
    assert rows(whole, f"select {columns} from rollouts where run = 'a' and iteration = 1 order by all") == [
        (0, 0, True, 0.5, None, None, {"exact": 1.0}),
        (0, 1, True, -0.5, None, None, {"exact": 0.0}),
        (1, 0, False, None, "zero_std", None, {"exact": 0.0}),
        (1, 1, False, None, "zero_std", "timeout", {"exact": 0.0}),
        (2, 0, False, None, None, None, {}),
        (2, 1, False, None, None, None, {}),
    ]
    assert rows(whole, "select distinct trained from rollouts where run = 'a' and iteration = 2") == [(None,)]
    assert rows(whole, "select advantage from rollouts where run = 'c' and trained order by all") == [(-9.0,), (9.0,)]


def test_a_fork_lists_what_it_shares_and_who_made_it(whole: Store) -> None:
    listed = [("a", 0, "a"), ("a", 1, "a"), ("b", 0, "a"), ("b", 1, "b"), ("c", 0, "a"), ("c", 1, "c")]
    assert rows(whole, "select run, iteration, made_by from iterations order by all") == listed
    assert rows(whole, "select run, iteration, made_by from iterations order by all", "b") == listed[2:4]
    history = (
        "select i.iteration, count(*) from iterations i join scores s on (s.run, s.iteration) = (i.made_by, "
        "i.iteration) where i.run = 'b'"
    )
    assert rows(whole, f"{history} group by all order by all") == [(0, 4), (1, 4)]
    runs = rows(
        whole,
        "select run, forked_from, fork_at, redo, num_segments, num_iterations, reward_mean from runs order by run",
    )
    assert runs == [("a", None, None, None, 0, 2, 0.25), ("b", "a", 0, None, 0, 2, 0.25),
                    ("c", "a", 0, "filter", 0, 2, 0.25),
                    ("s", None, None, None, 1, 0, None)]  # fmt: skip


def test_a_run_of_sft_alone_and_a_pruned_policy_are_listed(whole: Store) -> None:
    assert rows(whole, "select run, weight_version, metric, value from evaluations order by all") == [
        ("s", 0, "words_greedy", 0.25), ("s", 0, "words_pass_at_4", 0.5)
    ]  # fmt: skip
    assert rows(whole, "select run, weight_version, count(*) from evaluation_rollouts group by all") == [("s", 0, 2)]
    policies = (
        "select run, iteration, weight_version, pruned, bytes, year(ended_at) from artifacts where kind = "
        "'policy' and run in ('a', 's')"
    )
    assert rows(whole, f"{policies} order by all") == [
        ("a", 0, 1, True, 2, 2026),
        ("a", 1, 2, False, 2, 2026),
        ("s", 0, 0, False, 2, 2026),
    ]
    assert rows(whole, "select iteration, answer from prompts where prompt_id = 'p/2' and run = 'b'") == [
        (1, "answer 2")
    ]


def test_an_empty_store_has_views_without_rows(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    for name in VIEWS:
        assert rows(store, f"from {name}") == []
    with pytest.raises(UserError, match=r"no run 'x' in .*\(runs: none\)"):
        Queries(store, ["x"])


def test_what_is_damaged_is_named_and_left_out(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = made(store)
    key = f"{run.folder('rl', 0, 'scores/round-0')}/manifest.json"
    store.put(key, store.read(key)[:-30])
    result = sql(
        store, "select run, iteration, count(*) as n from scores where run = 'a' group by all", "--format", "csv"
    )
    assert result.exit_code == 1 and result.stdout.splitlines() == ["run,iteration,n", "a,1,4"]
    assert re.search(rf"^FAULT {store.address(key)} is damaged, or of another version", result.stderr, re.M)
    assert sql(store, "select count(*) from scores", "--run", "b").exit_code == 0
    assert sql(store, "select count(*) from iterations").exit_code == 0  # it reads no scores
    store.delete(f"{run.folder('rl', 1, 'scores/round-0')}/a1/scores.parquet")
    assert "rl/00001/scores/round-0/a1/scores.parquet is missing from the store" in sql(store, "from scores").stderr


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = made(store)
    key = f"{run.folder('rl', 0, 'scores/round-0')}/a1/scores.parquet"
    store.put(key, b"no Parquet")
    result = sql(store, "select avg(reward) from scores")
    assert result.exit_code == 1 and key in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_run_whose_parent_is_gone_has_its_own_rows(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    made(store)
    store.delete("runs/a/run.json")
    queries = Queries(store)
    assert list(queries.ask("select run, iteration from iterations order by all").rows) == [("b", 1), ("c", 1)]
    assert [fault for fault in queries.faults if "the run that it was forked from, a, is not there" in fault]


FAULTY = {
    "selct 1": "syntax error at or near",
    "select rewrd from scores": 'Referenced column "rewrd" not found.*Candidate bindings: "reward"',
    "select 1; select 2": "one query that reads",
    "": "one query that reads",
    "copy (select 1) to '{folder}/x.csv'": "one query that reads",
    "create table x as select 1": "one query that reads",
    "set lock_configuration = false": "one query that reads",
    "install httpfs": "one query that reads",
    "attach '{folder}/x.db'": "one query that reads",
    "select * from read_text('{folder}/secret')": "file system operations are disabled",
    "select * from '{folder}/secret.csv'": "file system operations are disabled",
    "select * from glob('{folder}/*')": "file system operations are disabled",
    "select * from query('select * from read_text(''{folder}/secret'')')": "file system operations are disabled",
    "select * from store": "Table with name store does not exist",  # a variable of this process
}


@pytest.mark.parametrize("query", FAULTY)
def test_a_faulty_query_is_one_line_and_no_query_touches_a_file(query: str, whole: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret.csv").write_text("a\nsecret")
    result = sql(whole, query.replace("{folder}", str(tmp_path)))
    assert result.exit_code == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and re.search(FAULTY[query], result.stderr), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "secret.csv"]


def test_a_name_in_a_text_that_is_run_is_no_empty_view(whole: Store) -> None:
    assert rows(whole, "select count(*) from query('select * from scores')") == [(16,)]
    assert rows(whole, "select count(*) from query_table('scores')") == [(16,)]


def test_only_what_a_query_names_is_read(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda self, key: keys.append(key) or read(self, key))
    rows(whole, "select count(*) from evaluations")
    records = [f"runs/{name}/run.json" for name in "abcs"]
    assert sorted(keys) == [*records, "runs/s/sft/00000/evaluation/manifest.json"]


def test_answers_as_a_table_csv_and_json(whole: Store) -> None:
    query = (
        "select run, iteration, 0.5 as half, {'a': [1, null]} as nested, null as nothing, repeat('x', "
        "99) as long from iterations where run = 'a' order by all"
    )
    header, rule, *lines = sql(whole, query).stdout.splitlines()
    assert header.split() == ["run", "iteration", "half", "nested", "nothing", "long"] and set(rule) == {"-", " "}
    assert lines[0].split() == ["a", "0", "0.5", '{"a":', "[1,", "null]}", "-", 59 * "x" + "…"] and len(lines) == 2
    assert (
        sql(whole, query, "--rows", "1").stdout.splitlines()[3]
        == "the first 1 rows; --rows shows more, --format csv or json all"
    )
    objects = [json.loads(line) for line in sql(whole, query, "--format", "json").stdout.splitlines()]
    assert objects[1] == {
        "run": "a",
        "iteration": 1,
        "half": 0.5,
        "nested": {"a": [1, None]},
        "nothing": None,
        "long": 99 * "x",
    }
    assert sql(whole, query, "--format", "csv").stdout.splitlines()[1] == 'a,0,0.5,"{""a"": [1, null]}",,' + 99 * "x"


@pytest.mark.parametrize("name", VIEWS)
def test_the_columns_of_a_view_are_those_of_the_page(name: str, whole: Store) -> None:
    section = re.split(r"^##+ ", PAGE.split(f"\n### {name}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    columns = re.findall(r"^\| `(\w+)` \| (.+?) \| ", section, re.M)
    assert [row[:2] for row in rows(whole, f"describe {name}")] == columns


def test_the_queries_of_the_page_run(whole: Store) -> None:
    commands = re.findall(r'^\.venv/bin/rlpipe sql ".*', PAGE, re.M)
    assert len(commands) >= 12
    for command in commands:
        rows(whole, shlex.split(command)[2])
