"""Prefect's UI as a user has it: fill the form, start a run, read why it failed,
press Retry, look at an iteration."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser import CHROMIUM, Browser, browser
from tests.pipeline import MINI, Folder
from tests.prefect_stand import Stand, running_stand

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with running_stand(tmp_path_factory.mktemp("stand")) as stand:
        yield stand


@pytest.fixture
def ui(stand: Stand) -> Iterator[Browser]:
    with browser(f"http://127.0.0.1:{stand.port}") as ui:
        yield ui


def test_a_run_is_started_retried_and_read_in_the_browser(stand: Stand, ui: Browser, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (stand.path / "moody.py").write_text(
        "import pathlib\ndef reward(prompt, completion):\n"
        f"    if pathlib.Path({str(broken)!r}).exists() and prompt['answer'] not in completion: "
        "raise RuntimeError('the grader is down')\n    return float(len(completion))\n"
    )
    broken.touch()
    fill_the_form(ui, tmp_path)
    expect(ui.page.get_by_text("scheduled to start now").first).to_be_visible()
    ui.open("/runs")
    ui.link("post-train browser").first.click()  # its name from when it starts
    ui.page.wait_for_url("**/flow-run/**")  # the list of runs has states, too
    expect(ui.state()).to_be_visible()
    page = ui.rest()
    flow_run = page.split("/")[3].split("?")[0]
    stand.wait(flow_run)
    ui.open(page)
    expect(ui.state()).to_have_text("Failed")
    ui.tab("Details")
    message = ui.page.get_by_text("Flow run encountered an exception")
    message.get_by_text("See More").click()
    expect(message).to_contain_text("the grader is down")
    expect(message).to_contain_text("In the UI, Retry starts it again")
    message.scroll_into_view_if_needed()
    ui.screenshot("failed-details")
    ui.tab("Logs")
    ui.screenshot("failed")

    broken.unlink()
    ui.button("Retry").click()
    dialog = ui.page.locator(".p-modal")
    ui.screenshot("retry")
    dialog.get_by_role("button", name="Retry", exact=True).click()
    expect(ui.state()).not_to_have_text("Failed")
    ui.rest()
    stand.wait(flow_run)
    ui.open(page)
    expect(ui.state()).to_have_text("Completed")
    ui.tab("Subflow Runs")
    ui.screenshot("completed")
    folder = Folder(tmp_path, f"file://{tmp_path}/store")
    assert folder.rlpipe("verify", "browser", "--store", folder.store)[0] == 0

    look_at_the_report(ui)
    what_was_committed_reads_cached(ui)
    look_at_an_iteration(ui)


def fill_the_form(ui: Browser, tmp_path: Path) -> None:
    """Starts a small run whose reward is broken: most of it in `changes`, some
    of it in fields of the config."""
    ui.open("/deployments")
    ui.link("post-train").first.click()
    ui.button("Run").click()
    ui.page.get_by_text("Custom run").click()
    expect(ui.field("changes")).to_contain_text("Only what differs from the config below")
    ui.screenshot("form")
    labels = ui.page.locator(".schema-form-property__label").all_inner_texts()
    told = [label.removesuffix(" (Optional)") for label in labels]
    assert told[:6] == ["changes", "config", "run", "model", "path", "context_tokens_max"], told[:6]
    first = [
        "data",
        "batch_size",
        "rewards",
        "num_iterations",
        "group_size",
        "estimator",
        "evaluation",
        "store",
        "tracking",
    ]
    assert sorted(first, key=told.index) == first, told
    expect(ui.field("reward_args")).to_contain_text("<answer>.+</answer>")

    settings = dict(each.split("=", 1) for each in MINI)
    changes = {name: tomllib.loads(f"value = {value}")["value"] for name, value in settings.items()}
    del changes["rl.num_iterations"]  # asked for in its own field
    changes |= {
        "tracking.uri": "",
        "tracking.view_url": "http://127.0.0.1:8450",
        "rl.rewards": {"moody:reward": 1.0, "format": 0.0},
    }
    ui.fill("changes", json.dumps(changes))
    ui.fill("run", "browser")
    ui.fill("store", f"file://{tmp_path}/store")
    ui.fill("num_iterations", "2")
    ui.field("objective").get_by_role("button", name="ppo").press("ArrowDown")
    expect(ui.page.get_by_role("option", name="cispo")).to_be_visible()
    ui.screenshot("form-choices")
    ui.page.keyboard.press("Escape")
    ui.fill("staleness_max", "-1")
    ui.button("Submit").click()
    expect(
        ui.page.get_by_text("'config.rl.staleness_max'. Failure reason: -1 is less than the minimum of 0").first
    ).to_be_visible()
    ui.screenshot("form-refused")
    ui.fill("staleness_max", "1")
    ui.button("Submit").click()


def look_at_the_report(ui: Browser) -> None:
    ui.tab("Artifacts")
    ui.page.get_by_text("browser-report", exact=True).first.click()
    expect(ui.page.get_by_role("heading", name="browser, 2 iterations")).to_be_visible()
    expect(ui.page.get_by_text("words_greedy")).to_be_visible()
    assert image_width(ui) > 400
    ui.screenshot("report")
    ui.page.go_back()


def what_was_committed_reads_cached(ui: Browser) -> None:
    ui.tab("Subflow Runs")
    ui.link("sft browser").first.click()  # the newest: the one of the retry
    ui.tab("Task Runs")
    for name in ("prepare tokenizer", "prepare model", "prepare sft data"):
        expect(ui.link(name)).to_be_visible()
    expect(ui.page.get_by_text("Cached", exact=True)).to_have_count(3)
    ui.screenshot("cached")


def look_at_an_iteration(ui: Browser) -> None:
    ui.open("/runs")
    ui.link("browser-00001").first.click()
    expect(ui.state()).to_have_text("Completed")
    ui.tab("Artifacts")
    ui.screenshot("iteration")
    ui.page.get_by_text("browser-00001-metrics", exact=True).first.click()
    expect(ui.page.get_by_role("heading", name="browser, iteration 1")).to_be_visible()
    expect(ui.page.get_by_role("cell", name="rollout/reward_mean", exact=True)).to_be_visible()
    assert image_width(ui) == 480
    ui.screenshot("iteration-metrics")
    ui.page.go_back()
    ui.tab("Artifacts")
    ui.page.get_by_text("browser-00001-view", exact=True).first.click()
    expect(ui.link("All groups and rollouts: rlpipe view").first).to_have_attribute(
        "href", "http://127.0.0.1:8450/runs/browser/iterations/1"
    )
    ui.page.go_back()
    ui.tab("Artifacts")
    ui.page.get_by_text("browser-00001-rollouts", exact=True).first.click()
    the_rollouts_are_shown_as_they_are(ui)
    ui.screenshot("rollouts")
    ui.open(
        f"/v2{ui.page.url.removeprefix(ui.root)}"
    )  # Prefect has two UIs: the links of logs lead to one, its start page to the other
    the_rollouts_are_shown_as_they_are(ui)
    ui.screenshot("rollouts-v2")


def the_rollouts_are_shown_as_they_are(ui: Browser) -> None:
    """With the tags that markdown would hide."""
    expect(ui.page.get_by_role("heading", name="browser, iteration 1: 4 of 8 groups")).to_be_visible()
    for column in ("reward", "advantage", "reward parts", "finish", "completion"):
        expect(ui.page.get_by_text(column, exact=True).first).to_be_visible()
    expect(ui.page.get_by_text("prompt: Spell this word backward (example: sun -> nus): ").first).to_be_visible()
    expect(ui.page.get_by_role("cell").filter(has_text=re.compile("^ *<answer>.+")).first).to_be_visible()
    expect(ui.page.get_by_text(re.compile("^answer: [a-z]+$")).first).to_be_visible()


def image_width(ui: Browser) -> int:
    """The width of the image in the artifact as the browser decoded it, pixels; 0: it did not."""
    return ui.page.locator("article img, .markdown-renderer img").first.evaluate("image => image.naturalWidth")
