"""`rlpipe view`: what its pages show of a store, that they escape and
only read, and whom they answer."""

from __future__ import annotations

import base64
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from typer.testing import CliRunner

from flows import cli
from flows.ui import _group_table
from rlpipe.base.errors import UserError
from rlpipe.base.values import JsonDict
from rlpipe.config.operational import TrackingConfig
from rlpipe.config.source import override_config
from rlpipe.data.new_tokenizer import build_tokenizer
from rlpipe.extras.search.course import Course
from rlpipe.extras.search.halving import Search
from rlpipe.extras.search.population import Population
from rlpipe.extras.view import search as looking
from rlpipe.extras.view.groups import iteration_groups
from rlpipe.extras.view.library import Library
from rlpipe.extras.view.plots import curve, plot
from rlpipe.extras.view.server import VIEW_KEY_VARIABLE, view_app, view_key
from rlpipe.extras.view.tokens import shown_tokens, token_texts
from rlpipe.report.show import iteration_report, runs_report, trained_groups
from rlpipe.store.artifacts import PRUNED
from rlpipe.store.backend import Store, open_store
from rlpipe.store.opening import create_or_continue, fork, open_existing
from rlpipe.store.run import Run
from tests.extras.queries.test_queries import (
    commit_files,
    commit_sampled,
    commit_scored,
    commit_trained,
    commit_whole,
    made,
    only,
    rows_of,
)
from tests.rows import BATCH, GAPS, PROMPTS, SCORES, fill, rollout, to_parquet
from tests.search_world import AT, METRIC, play, searched_run
from tests.store.test_run import record_of, sealed, tiny

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>\0\x1b[2J\x9b\u202e&amp;"

ENGINES_OWN = ["rl.proximal=engine", "rl.importance=none"]


def client(store: Store, key: str = "", **headers: str) -> TestClient:
    return TestClient(view_app(store, key), base_url="http://127.0.0.1:8450", headers=headers)


def text_of(html: str) -> str:
    """A page without its tags, on one line."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(f"file://{tmp_path_factory.mktemp('view')}/store")
    whole_store(store, tmp_path_factory.mktemp("tokenizer"))
    return store


def whole_store(store: Store, folder: Path) -> None:
    """The runs of extras/queries/test_queries.py; a has a tokenizer too, and evaluations of
    versions 0 and 1 on prompts of their own."""
    run = made(store)
    build_tokenizer(["Spell this word"], folder)
    commit_files(run, ("base", 0, "tokenizer"), {"tokenizer.json": (folder / "tokenizer.json").read_bytes()})
    for version, (phase, number) in enumerate([("base", 0), ("rl", 0)]):
        rows = [row | {"prompt_id": f"h/{row['group_index']}", "reward": float(version)} for row in rows_of(0)[:4]]
        commit_files(
            run,
            (phase, number, "evaluation"),
            {"evaluation.parquet": only(rows, SCORES)},
            {"h_greedy": version},
            version,
        )


def page(store: Store, path: str, status: int = 200) -> str:
    answer = client(store).get(path)
    assert answer.status_code == status, answer.text[-2000:]
    return answer.text


def plots_of(html: str) -> list[JsonDict]:
    return json.loads(unescape(re.findall(r'data-plots="([^"]*)"', html)[0]))


@pytest.mark.slow
def test_every_link_of_every_page_leads_to_a_page(store: Store, tmp_path: Path) -> None:
    """On a disk and on S3. A store that changes in no byte."""
    whole_store(store, tmp_path)
    before = {key: store.read(key) for key in store.list("runs")}
    pages, waiting, seen = client(store), ["/", "/compare?run=a&run=b&run=c", "/search?text=answer"], set[str]()
    while waiting:
        path = waiting.pop()
        answer = pages.get(path)
        assert answer.status_code == 200, f"{path}: {answer.status_code}"
        links = {link.replace("&amp;", "&") for link in re.findall(r'href="(/[^"]*)"', answer.text)}
        waiting += sorted(links - seen)
        seen |= links
    kinds = {re.sub(r"\d+", "N", path.split("?")[0].replace("/a/", "/RUN/")) for path in seen}
    assert {
        "/runs/RUN/iterations/N",
        "/runs/RUN/iterations/N/groups/N",
        "/runs/RUN/iterations/N/groups/N/rollouts/N",
    } <= kinds
    assert {
        "/runs/RUN/prompts",
        "/runs/RUN/evaluations/N/groups/N",
        "/runs/RUN/evaluations/N/groups/N/rollouts/N",
    } <= kinds
    assert {key: store.read(key) for key in store.list("runs")} == before


def test_the_first_page_shows_every_run_and_reads_no_rollouts(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "read", lambda *_: pytest.fail("a Parquet file is read"))
    html = page(whole, "/")
    for line in runs_report(whole).lines():
        name, state = line.split()[0], line.split("  ")[-1].strip()
        assert f'href="/runs/{name}"' in html and (state in html or "forked" in state)
    assert "a at 0" in html and "unfinished" in text_of(html)


@pytest.mark.parametrize("kind", [Search, Population])
def test_a_search_has_the_table_of_its_report_and_a_curve_a_candidate(kind: type[Search], tmp_path: Path) -> None:
    parent = searched_run(tmp_path)
    store, vary = parent.store, {"rl.learning_rate": ["1e-4", "2e-4", "4e-4", "8e-4"]}
    assert "Searches:" not in page(store, "/")
    search = kind("s", "a", AT, vary, [1, 2, 4], 0.5, METRIC)
    course = Course.begun(search, parent)
    assert "0 of 3 decisions are made" in text_of(page(store, "/searches/s"))
    play(course, acts_max=9)  # the first rung is decided
    assert "1 of 3 decisions are made" in text_of(page(store, "/searches/s")) and "goes on" in page(
        store, "/searches/s"
    )
    course = Course.begun(search, parent)
    play(course)
    html = page(store, "/searches/s")
    rows = [text_of(row) for row in re.findall(r"<tr class=.row.*?</tr>", html, re.S)]
    report = [line for line in course.report() if line.startswith("| s-")]
    for row, line in zip(rows, report, strict=True):
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        scores = [cell for cell in cells[1:] if re.fullmatch(r"[\d.e-]+", cell)]
        assert row.startswith(" ".join([cells[0], *scores])), (row, line)
    assert "the winner" in rows[0] and "lost" in rows[-1] and "a at 1" in rows[-1]
    (drawn,) = plots_of(html)
    assert [series["name"] for series in drawn["series"]] == [row.split()[0] for row in rows]
    assert drawn["series"][0]["x"][-1] == AT + 1 + 4
    assert '<a href="/searches/s">' in page(store, "/")
    assert "no search &#39;t&#39;" in page(store, "/searches/t", 404) and "(searches: s)" in page(
        store, "/searches/t", 404
    )
    store.put("searches/s/rung-1.json", b"{")
    assert "rung-1.json is damaged" in page(store, "/searches/s", 500)


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    commit_whole(create_or_continue(tiny(store, "sft.num_steps=0")), 0)
    store.put("runs/bad/run.json", b"{")
    html = page(store, "/")
    assert 'href="/runs/a"' in html and "bad: " in html and "is damaged" in html
    assert "is damaged" in page(store, "/runs/bad", 500)


def test_an_iteration_says_what_became_of_every_group(whole: Store) -> None:
    text = text_of(page(whole, "/runs/a/iterations/1"))
    assert "1 trained" in text and "zero_std 1" in text and "1 left out" in text
    assert "dropped: zero_std" in text
    dropped = page(whole, "/runs/a/iterations/1?fate=dropped")
    assert "prompt 1" in dropped and "prompt 0" not in dropped
    assert "prompt 2" not in page(whole, "/runs/a/iterations/1?text=PROMPT+0")
    assert "choose all, trained" in page(whole, "/runs/a/iterations/1?fate=nothing", 404)
    assert "nothing of it is scored" in page(whole, "/runs/a/iterations/2", 404)


def test_groups_are_sorted_as_asked_for(whole: Store) -> None:
    def order(name: str) -> list[str]:
        return re.findall(r"groups/(\d)\"", page(whole, f"/runs/a/iterations/1?order={name}"))

    assert order("group") == ["0", "1", "2"] and order("best") == ["0", "1", "2"] and order("worst")[0] == "1"
    assert order("spread")[0] == "0"


def test_an_iteration_under_way_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    """A page that is asked for again sees what was committed meanwhile; a run that was made again
    under its name is another one."""
    store = open_store(f"file://{tmp_path}/store")
    run = create_or_continue(tiny(store, "sft.num_steps=0"))
    commit_whole(run, 0)
    pages = client(store)
    assert "not committed yet" not in pages.get("/runs/a").text
    commit_sampled(run, 1)
    commit_scored(run, 1)
    assert "iteration 1, not committed yet" in pages.get("/runs/a").text
    assert "3 not filtered yet" in text_of(pages.get("/runs/a/iterations/1").text)
    commit_trained(run, 1)
    assert "1 trained" in text_of(pages.get("/runs/a/iterations/1").text)
    assert plots_of(pages.get("/runs/a").text)[0]["series"][0]["y"] == [0.0, 0.25]

    for key in store.list("runs/a"):
        store.delete(key)
    again = create_or_continue(tiny(store, "sft.num_steps=0"))
    commit_whole(again, 0)
    assert plots_of(pages.get("/runs/a").text)[0]["series"][0]["y"] == [0.0]


def test_a_group_has_prompt_answer_rewards_and_advantages(whole: Store) -> None:
    text = text_of(page(whole, "/runs/a/iterations/1/groups/0"))
    assert "reference answer answer 0" in text and "prompt p/0" in text
    assert (
        "0 1 1 0.5 1 0 0 3 stop 0, 1 e" in text
    )  # rollout, reward, exact, advantage, completion, tokens, finish, versions, engine
    assert "1 0 0 -0.5 1 0 1" in text
    faulty = text_of(page(whole, "/runs/a/iterations/1/groups/1"))
    assert "dropped: zero_std" in faulty and "timeout" in faulty
    assert "has no group 77" in page(whole, "/runs/a/iterations/1/groups/77", 404)
    assert "no group has such a number" in page(whole, f"/runs/a/iterations/1/groups/{10**20}", 404)


def test_a_fork_shows_what_it_shares_and_what_it_redid(whole: Store) -> None:
    assert "0.5" in text_of(page(whole, "/runs/b/iterations/0/groups/0"))
    redone = text_of(page(whole, "/runs/c/iterations/1/groups/0"))
    assert " 9 " in redone and "-9" in redone
    assert "rl.estimator" in page(whole, "/compare?run=a&run=c") and "rloo" in page(whole, "/compare?run=a&run=c")


def test_runs_side_by_side_have_a_curve_each_in_every_plot(whole: Store) -> None:
    html = page(whole, "/compare?run=a&run=b&metric=train/loss&metric=rollout/reward_mean")
    plots = plots_of(html)
    assert [plot["title"] for plot in plots] == ["train/loss", "rollout/reward_mean"]
    assert [series["name"] for series in plots[1]["series"]] == ["a", "b"]
    assert plots[1]["series"][0]["x"] == [0, 1] and plots[1]["series"][0]["y"] == [0.0, 0.25]
    assert "choose 1 to 8 runs" in page(whole, "/compare", 404)
    assert "no run &#39;z&#39;" in page(whole, "/compare?run=a&run=z", 404)


def test_the_evaluation_before_rl_is_the_first_point_of_its_curve(tmp_path: Path) -> None:
    """From 0.918 over 0.97 to 0.969 a run has become better, though its last two points fall; and
    of what `rlpipe evaluate` made the newest."""
    store = open_store(f"file://{tmp_path}/store")
    for name, evaluated in (("a", [0.97, 0.969]), ("b", [])):
        run = create_or_continue(tiny(store, f"run={name}", "sft.num_steps=0", "rl.num_iterations=2"))
        commit_files(run, ("base", 0, "evaluation"), {}, {"h_greedy": 0.918}, version=0)
        for iteration in range(2):
            own = {"evaluation/h_greedy": evaluated[iteration]} if evaluated else {}
            record = record_of(run, iteration, {"rollout/reward_mean": 0.5} | own, {})
            assert store.create(run.iteration_key(iteration), sealed(record))
    commit_files(run, ("rl", 1, "evaluation"), {}, {"h_greedy": 0.99}, version=2)
    expected = {"a": ([0, 1, 2], [0.918, 0.97, 0.969]), "b": ([0, 2], [0.918, 0.99])}
    for path in ("/runs/a", "/runs/b", "/compare?run=a&run=b"):
        (drawn,) = [one for one in plots_of(page(store, path)) if one["title"] == "evaluation/h_greedy"]
        assert drawn["x_title"] == "weight version"
        assert {one["name"]: (one["x"], one["y"]) for one in drawn["series"]}.items() <= expected.items()
    assert "0.969 0.99" in text_of(page(store, "/compare?run=a&run=b"))


def test_the_loss_of_sft_is_drawn_with_the_validation_loss_beside_it(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = create_or_continue(
        tiny(store, "sft.num_steps=4", "sft.segment_steps=2", "sft.decay_steps=4", "sft.warmup_steps=0")
    )
    for segment, losses in enumerate([[4.0, 3.0], [2.0, 1.0]]):
        metrics = {"losses": losses, "train/loss": losses[-1], "train/validation_loss": losses[-1] + 0.5}
        commit_files(run, ("sft", segment, "policy"), {}, metrics, version=0)
        (drawn,) = plots_of(page(store, "/runs/a"))  # the second time while RL has not begun
        assert (drawn["title"], drawn["x_title"], drawn["series"][0]["y"][-2:]) == ("sft/loss", "SFT step", losses)
    assert [(one["name"], one["x"], one["y"]) for one in drawn["series"]] == [
        ("a", [0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0]), ("a, validation", [1, 3], [3.5, 1.5])
    ]  # fmt: skip
    assert "<option>sft/validation_loss</option>" in page(store, "/runs/a")


@pytest.mark.parametrize(
    ("points", "x_range", "y_range"),
    [
        ([(0, 0.918)], (-0.5, 0.5), (0.0, 1.1475)), ([(7, 64.0)], (6.5, 7.5), (0.0, 80.0)),
        ([(0, 0.0)], (-0.5, 0.5), (-0.05, 1.0)),
        ([(0, -2.0), (1, -2.0)], None, (-2.5, 0.0)), ([(0, 1.0), (1, 1.0), (2, 1.0)], None, (0.0, 1.25)),
        ([(0, 1.0), (1, 2.0)], None, None),
        ([], None, None), ([(0, None), (1, 4.0)], (0.5, 1.5), (0.0, 5.0)),
    ],
)  # fmt: skip
def test_axes_along_which_all_points_are_the_same_have_a_range(points: list[Any], x_range: Any, y_range: Any) -> None:
    drawn = plot("m", "iteration", [curve("a", points, "")])
    assert (drawn.x_range, drawn.y_range) == (x_range, y_range)


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    for length in (1, 2, 999, 1000, 1001, 12_345):
        thinned = curve("a", [(x, float(x)) for x in range(length)], "")
        assert len(thinned.x) <= 1001 and (thinned.x[0], thinned.x[-1]) == (0, length - 1), length


def test_settings_have_a_line_each(whole: Store) -> None:
    """Also those of data sets: what differs is the field, not the whole of `data`."""
    assert "<td>data.0.source</td><td>" in page(whole, "/runs/a") and "[{" not in text_of(page(whole, "/runs/a"))


def commit_turns(run: Run, tokenizer: Tokenizer) -> None:
    """Iteration 0, and the evaluation of version 0: rollout 0 of group 0 has three turns of the
    policy, the others one."""
    said = ["this", "<|tool|>a word<|end|>", "Spell<|end|>", "<|tool|>b<|end|>", "word"]
    pieces = [tokenizer.encode(text).ids for text in said]
    told = [index % 2 == 1 for index, piece in enumerate(pieces) for _ in piece]
    outcome = {"reward": 1.0, "num_turns": 3, "fault": "", "metrics": {},
               "messages": [[{"role": "tool", "content": "a word"}],
                            [{"role": "tool", "content": "b"}], []]}  # fmt: skip
    rows = [row | {"environment": json.dumps({**outcome, "num_turns": 1, "messages": []})} for row in rows_of(0)]
    tokens = [token for piece in pieces for token in piece]
    rows[0] |= {"completion": tokenizer.decode(tokens), "completion_tokens": tokens,
                "loss_mask": [int(not one) for one in told],
                "rollout_logprobs": [0.0 if one else -0.5 for one in told], "environment": json.dumps(outcome),
                "weight_versions": [{"version": 0, "num_tokens": len(tokens)}]}  # fmt: skip
    commit_files(run, ("base", 0, "evaluation"), {"evaluation.parquet": only(rows, SCORES)}, {"h_greedy": 0.0}, 0)
    commit_files(run, ("rl", 0, "scores/round-0"), {"scores.parquet": only(rows, SCORES)})
    prompt = fill({"prompt_id": "p/0", "source": "p", "messages": "[]", "metadata": "{}", "answer": "x"}, PROMPTS)
    prompts = commit_files(run, ("rl", 0, "prompts/round-0"), {"prompts.parquet": to_parquet([prompt], PROMPTS)})
    batch = {"batch.parquet": only([row | {"advantage": 0.5} for row in rows[:2]], BATCH)}
    artifacts = {"prompts": prompts, "batch": commit_files(run, ("rl", 0, "batch/round-0"), batch, {"dropped": {}})}
    assert run.store.create(run.iteration_key(0), sealed(record_of(run, 0, {}, artifacts)))


def test_turns_are_kept_apart_wherever_a_rollout_is_shown(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = create_or_continue(
        tiny(store, "sft.num_steps=0", "rl.environment=calculator", "rl.rewards={environment = 1.0}")
    )
    build_tokenizer(["Spell this word"], tmp_path)
    commit_turns(run, Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    apart = "assistant this tool a word assistant Spell tool b assistant word"
    group, evaluations = "/runs/a/iterations/0/groups/0", "/runs/a/evaluations?before=0&after=0"
    without = text_of(page(store, group))  # the tokenizer is missing: the text as it is
    assert apart not in without and "this" in without
    names = ("tokenizer.json", "tokenizer_config.json")
    commit_files(run, ("base", 0, "tokenizer"), {name: (tmp_path / name).read_bytes() for name in names})
    for path in (group, evaluations, "/runs/a/prompts?id=p/0"):
        assert apart in text_of(page(store, path)), path
    html = page(store, f"{group}/rollouts/0")
    assert re.findall(r'<b class="speaker">(\w+)</b>', html) == ["assistant", "tool"] * 2 + ["assistant"]
    assert "after turn 1: tool" in html and "after turn 2: tool" in html
    assert "speaker" not in page(store, f"{group}/rollouts/1")
    lines = [line.strip() for line in iteration_report(run, 0, rows_max=1).lines()[-6:]]
    assert lines[0].split("  ")[-2:] == ["5 turns", "(exact 1)"]
    assert lines[1:] == ["assistant: 'this'", "tool: 'a word'", "assistant: 'Spell'", "tool: 'b'", "assistant: 'word'"]
    record = run.iteration(0)
    assert record is not None
    table = "\n".join(_group_table(trained_groups(run, record)[0]))
    assert r"\[assistant\] this ⏎ \[tool\] a word ⏎ \[assistant\] Spell" in table


def test_a_rollout_is_shown_token_by_token(whole: Store) -> None:
    html = page(whole, "/runs/a/iterations/1/groups/0/rollouts/0?colour=mask")
    titles = re.findall(r'<span class="t[^>]*title="([^"]*)"', html)
    assert len(titles) == 3
    assert (
        titles[0].startswith("0: 5 ")
        and titles[0].endswith("logprob -0.500, version 0, trained")
        and "version 1" in titles[1]
    )
    assert 'class="colour-mask"' in html and "advantage <b>0.5</b>" in html
    assert "choose logprob, gap, mask" in page(whole, "/runs/a/iterations/1/groups/0/rollouts/0?colour=other", 404)


def test_the_gap_between_engine_and_trainer_colours_the_tokens(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = create_or_continue(tiny(store, "sft.num_steps=0"))
    build_tokenizer(["Spell this word"], tmp_path)
    commit_files(run, ("base", 0, "tokenizer"), {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()})
    commit_whole(run, 0)
    rollout_0, rollout_1 = (f"/runs/a/iterations/0/groups/0/rollouts/{index}?colour=gap" for index in range(2))
    assert "iteration 0 has none stored: an older version of rlpipe trained it" in text_of(page(store, rollout_0))
    rows = [
        {"group_index": 0, "rollout_index": 1, "gap": [0.5, float("nan"), -0.03]},
        {"group_index": 0, "rollout_index": 0, "gap": [0.5]},
    ]
    commit_files(run, ("rl", 0, "gap"), {"gap.parquet": to_parquet(rows, GAPS)})
    html = page(store, rollout_1)
    assert "engine-trainer gap: mean 0.265, largest 0.5" in text_of(html) and 'class="colour-gap"' in html
    assert re.findall(r"--g:(-?\d\.\d\d)", html) == ["1.00", "0.00", "-0.15"]
    titles = re.findall(r'<span class="t[^>]*title="([^"]*)"', html)
    assert "logprob -0.500, gap +0.5, version" in titles[0] and "gap" not in titles[1] and "gap -0.03, " in titles[2]
    assert html.count('class="t ng"') == 1
    assert "gap.parquet has 1 gaps of a rollout with 3 trained tokens" in page(store, rollout_0)
    assert "it is in no batch" in text_of(page(store, "/runs/a/iterations/0/groups/1/rollouts/0?colour=gap"))
    commit_sampled(run, 1)
    commit_scored(run, 1)
    commit_files(
        run,
        ("rl", 1, "batch/round-0"),
        {"batch.parquet": only([row | {"advantage": 0.5} for row in rows_of(1)[:2]], BATCH)},
    )
    assert "the iteration is not trained yet" in text_of(page(store, rollout_1.replace("iterations/0", "iterations/1")))


@pytest.mark.parametrize(("sets", "why"), [([], "nobody recorded"), (ENGINES_OWN, "its step was not the first")])
def test_a_rollout_whose_gaps_are_not_known_says_why(tmp_path: Path, sets: list[str], why: str) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = create_or_continue(tiny(store, "sft.num_steps=0", *sets))
    build_tokenizer(["Spell this word"], tmp_path)
    commit_files(run, ("base", 0, "tokenizer"), {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()})
    commit_whole(run, 0)
    rows = [{"group_index": 0, "rollout_index": 1, "gap": [float("nan")] * 3}]
    commit_files(run, ("rl", 0, "gap"), {"gap.parquet": to_parquet(rows, GAPS)})
    fork(run, 0, override_config(run.config, ["run=b", "rl.proximal=trainer"]))  # which did not train that iteration
    for name in ("a", "b"):
        assert why in text_of(page(store, f"/runs/{name}/iterations/0/groups/0/rollouts/1?colour=gap"))


def test_a_store_without_the_tokenizer_shows_the_text(tmp_path: Path) -> None:
    tokenless = open_store(f"file://{tmp_path}/store")
    commit_whole(create_or_continue(tiny(tokenless, "sft.num_steps=0")), 0)
    html = page(tokenless, "/runs/a/iterations/0/groups/0/rollouts/0")
    assert "tokenizer/manifest.json is missing from the store" in html and "<pre>0 0 0</pre>" in html


def test_tokens_add_up_to_the_text(tmp_path: Path) -> None:
    """Also where a character is made of several tokens, and where bytes make none."""
    build_tokenizer(["Spell this word"], tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode("this é日本 word🎉<|end|>").ids
    texts = token_texts(tokens, tokenizer)
    assert "".join(texts) == "this é日本 word🎉<|end|>" and "" in texts and "日" in texts
    broken = [token for token in tokens if texts[tokens.index(token)] == ""] * 20
    assert len(token_texts(broken, tokenizer)) == len(broken)
    for seed in range(20):
        noise = np.random.Generator(np.random.PCG64(seed)).integers(0, tokenizer.get_vocab_size(), 200).tolist()
        assert "".join(token_texts(noise, tokenizer)) == tokenizer.decode(noise, skip_special_tokens=False)


def test_the_mask_is_the_one_that_was_trained_with_and_an_unrecorded_logprob_is_none(tmp_path: Path) -> None:
    build_tokenizer(["Spell this word"], tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    row = rows_of(3)[0] | {"rollout_logprobs": [-9.0, float("inf"), 0.0]}
    tokens = shown_tokens(rollout(row), [0, 1, 1], tokenizer)
    assert [(token.is_trained, token.logprob, token.surprise, token.version) for token in tokens] == [
        (False, -9.0, 1.0, 2), (True, None, 0.0, 3), (True, 0.0, 0.0, 3),
    ]  # fmt: skip


def test_what_a_policy_wrote_is_text_on_every_page(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = create_or_continue(tiny(store, "sft.num_steps=0", "rl.num_iterations=1"))
    evil: JsonDict = {
        "prompt": EVIL,
        "completion": EVIL,
        "prompt_id": f"p/{EVIL}",
        "engine": EVIL,
        "reward_fault": EVIL,
    }
    rows = [row | evil | {"reward_parts": json.dumps({EVIL: 1.0})} for row in rows_of(0)[:2]]
    prompt = fill({"prompt_id": f"p/{EVIL}", "source": EVIL, "messages": json.dumps([{"role": EVIL, "content": EVIL}]),
                   "answer": EVIL, "metadata": json.dumps({EVIL: EVIL})}, PROMPTS)  # fmt: skip
    commit_files(run, ("rl", 0, "prompts/round-0"), {"prompts.parquet": to_parquet([prompt], PROMPTS)})
    commit_files(run, ("rl", 0, "scores/round-0"), {"scores.parquet": only(rows, SCORES)})
    batch = {"batch.parquet": only([row | {"advantage": 1.0} for row in rows], BATCH)}
    commit_files(run, ("rl", 0, "batch/round-0"), batch, {"dropped": {"5": EVIL}})
    commit_files(run, ("base", 0, "evaluation"), {"evaluation.parquet": only(rows, SCORES)}, {"words_greedy": 1.0}, 0)
    pages, query = client(store), {"id": f"p/{EVIL}", "text": EVIL}
    paths = ["/runs/a/iterations/0", "/runs/a/iterations/0/groups/0",
             "/runs/a/iterations/0/groups/0/rollouts/0", "/runs/a/prompts",
             "/runs/a/evaluations", "/search", "/runs/a/evaluations/0/groups/0", f"/{EVIL[:40]}",
             "/compare?run=" + EVIL[:40]]  # fmt: skip
    for path in paths:
        answer = pages.get(path) if "?" in path else pages.get(path, params=query)
        assert "<script>alert" not in answer.text and "<img" not in answer.text, path
        assert "&lt;script&gt;" in answer.text and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", answer.text), (
            path
        )
        assert "script-src 'self';" in answer.headers["content-security-policy"]


def test_a_prompt_is_followed_through_the_iterations_and_the_evaluations(whole: Store) -> None:
    html = page(whole, "/runs/a/prompts?id=p/0")
    assert plots_of(html)[0]["series"][0] == {
        "name": "p/0",
        "x": [0, 1],
        "y": [0.5, 0.5],
        "link": "/runs/a/iterations/",
    }
    assert html.index("iterations/1/groups/0") < html.index("iterations/0/groups/0")
    evaluated = plots_of(page(whole, "/runs/a/prompts?id=h/1"))[0]["series"][0]
    assert evaluated == {"name": "h/1", "x": [0, 1], "y": [0.0, 1.0], "link": "/runs/a/evaluations/"}
    assert "has the prompt" in page(whole, "/runs/a/prompts?id=p/99", 404)


def test_a_search_is_bounded_and_goes_on_where_it_ended(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    html = page(whole, "/search?text=PROMPT+1&run=a")
    assert "4 rollouts in 5 iterations" in text_of(html) or "4 rollouts in 3 iterations" in text_of(html)
    assert "<mark>prompt 1</mark>" in html
    everywhere = text_of(page(whole, "/search?text=1+0+1"))
    assert "a, 1, 0, 1" in everywhere and "b, 1, 0, 1" in everywhere
    monkeypatch.setattr(looking, "READERS", 1)
    monkeypatch.setattr(looking, "SECONDS_MAX", 0.0)
    seen, path = list[str](), "/search?text=prompt+1"
    for _ in range(20):
        html = page(whole, path)
        seen += re.findall(r"iterations/(\d+/groups/\d+/rollouts/\d+)", html)
        rest = re.findall(r'href="(/search\?[^"]*from=[^"]*)"', html)
        if not rest:
            break
        path = rest[0].replace("&amp;", "&")
    assert (
        len(seen) == 2 * 2 + 2 * 2 + 2 * 2
    )  # runs a, b, c have two scored iterations each, and two rollouts of group 1 in each


def test_a_damaged_file_is_named_and_the_others_are_searched(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = create_or_continue(tiny(store, "sft.num_steps=0"))
    commit_whole(run, 0)
    commit_whole(run, 1)
    (damaged,) = [key for key in store.list("runs/a/rl/00001/scores") if key.endswith(".parquet")]
    store.put(damaged, b"PAR1" * 100)
    html = page(store, "/search?text=prompt+1")
    assert "2 rollouts" in text_of(html) and f"{store.address(damaged)} cannot be read" in html
    assert "cannot be read" in page(store, "/runs/a/iterations/1", 500)


def test_answers_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    run = create_or_continue(tiny(store, "sft.num_steps=0", "rl.num_iterations=2"))
    for version, (phase, number) in enumerate([("base", 0), ("rl", 0)]):
        rows = [{**row, "completion": f"answer {version if row['group_index'] == 1 else 'x'}",
                 "reward": float(version != row["group_index"])}
                for row in rows_of(0)]  # fmt: skip
        if phase == "rl":
            commit_whole(run, 0)
        commit_files(
            run,
            (phase, number, "evaluation"),
            {"evaluation.parquet": only(rows, SCORES)},
            {"p_greedy": version / 2},
            version,
        )
    html = page(store, "/runs/a/evaluations")
    assert "1 better, 1 worse, 1 with another text" in text_of(html)
    assert plots_of(html)[0]["series"][0]["y"] == [0.0, 0.5]
    better = page(store, "/runs/a/evaluations?before=0&after=1&show=better")
    assert better.count('class="row') == 1 and 'class="row better"' in better
    assert "show=&#39;nothing&#39;" in page(store, "/runs/a/evaluations?show=nothing", 404)
    assert "is not evaluated; rlpipe evaluate a --version 2" in page(store, "/runs/a/evaluations?after=2", 404)
    assert "before=&#39;x&#39;: a whole number" in page(store, "/runs/a/evaluations?before=x", 404)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8450", "127.0.0.1.evil.example", ""])
def test_a_browser_that_calls_this_machine_by_another_name_is_refused(whole: Store, host: str) -> None:
    assert client(whole).get("/", headers={"Host": host}).status_code == 400
    for name in ("127.0.0.1:8450", "localhost", "[::1]:8450"):
        assert client(whole).get("/", headers={"Host": name}).status_code == 200


def test_a_key_is_asked_for_as_a_password(whole: Store) -> None:
    def basic(text: str) -> str:
        return f"Basic {base64.b64encode(text.encode()).decode()}"

    for wrong in ("", basic("anybody:wrong"), basic("key"), "Bearer key", "Basic ***", basic("key:"), basic(":keyy")):
        for path in ("/", "/runs/a", "/static/x/view.js"):
            answer = client(whole, "key", **({"Authorization": wrong} if wrong else {})).get(path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic"), (wrong, path)
            assert "runs/a" not in answer.text
    assert client(whole, "key", Authorization=basic("anybody:key")).get("/").status_code == 200
    assert client(whole, "kéy", Authorization=basic(":kéy")).get("/").status_code == 200


def test_beyond_loopback_the_view_needs_a_key(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VIEW_KEY_VARIABLE, raising=False)
    for address in ("0.0.0.0", "192.0.2.7", "::"):
        with pytest.raises(UserError, match=VIEW_KEY_VARIABLE):
            view_key(address)
        result = CliRunner().invoke(cli.app, ["view", "--store", whole.url, "--host", address])
        assert result.exit_code == 2 and VIEW_KEY_VARIABLE in result.output
    assert view_key("127.0.0.1") == ""
    monkeypatch.setenv(VIEW_KEY_VARIABLE, " k ")
    assert view_key("0.0.0.0") == "k" == view_key("127.0.0.1")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_pages_only_answer_to_those_who_read(whole: Store, method: str) -> None:
    assert client(whole).request(method, "/runs/a").status_code == 405


def test_scripts_are_kept_by_browsers_and_come_from_here_alone(whole: Store) -> None:
    html = page(whole, "/compare?run=a")
    sources = re.findall(r'(?:src|href)="(/static/[^"]*)"', html)
    assert len(sources) == 3 and not re.findall(r'(?:src|href)="(?:https?:)?//', html)
    for source in sources:
        answer = client(whole).get(source)
        assert (
            answer.status_code == 200 and "immutable" in answer.headers["cache-control"] and len(answer.content) > 1000
        )
    for elsewhere in ("/static/0/view.js", "/static/0/..%2f..%2fserver.py", sources[0].replace("view.css", "view.js")):
        assert client(whole).get(elsewhere).status_code == 404


def test_links_lead_to_pages_where_the_config_says_so() -> None:
    assert TrackingConfig().view_of("a") == ""
    assert TrackingConfig(view_url="http://h:1/").view_of("a", "/iterations/3") == "http://h:1/runs/a/iterations/3"
    for wrong in ("javascript:alert(1)", "h:8450", "http://h?x", "http://a b"):
        with pytest.raises(ValueError, match="view_url"):
            TrackingConfig(view_url=wrong)


def test_a_policy_that_was_pruned_hides_no_rollout(whole: Store) -> None:
    assert whole.exists(f"{open_existing(whole, 'a').folder('rl', 0, 'policy')}/{PRUNED}")
    assert len(iteration_groups(Library(whole), open_existing(whole, "a"), 0).groups()) == 3


def test_odd_addresses_are_answered_with_a_page_that_says_so(whole: Store) -> None:
    for path in ("/runs/..%2f..", "/runs/z", "/nothing", "/runs/a/iterations/-1", "/runs/a/iterations/x",
                 "/runs/a/iterations/99999999999",
                 "/runs/a/evaluations/-7", "/runs/a?first=-1", "/runs/a/prompts",
                 "/search?text=a&from=a/b"):  # fmt: skip
        assert "This cannot be shown" in page(whole, path, 404), path
