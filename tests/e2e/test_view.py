"""`rlpipe view` over a real run, in a headless Chromium: with the mouse, with keys, by its links,
and while nobody may read without the key."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from rlpipe.extras.view.groups import iteration_groups
from rlpipe.extras.view.library import Library
from rlpipe.store.opening import open_existing
from tests.browser import CHROMIUM, Browser, browser
from tests.deadlines import DEADLINE_S
from tests.pipeline import BIN, Undisturbed, kill_group

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]


@contextlib.contextmanager
def serving_view(store: str, **environment: str) -> Iterator[str]:
    """The address of `rlpipe view`, without the slash."""
    command = [str(BIN / "rlpipe"), "view", "--store", store, "--port", "0"]
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert " shows the runs in " in line, line
        yield line.split("/ shows")[0]
        process.terminate()
        assert process.wait(timeout=DEADLINE_S) == 143
    finally:
        kill_group(process)
        if process.stdout:
            process.stdout.close()


@pytest.fixture(scope="module")
def address(undisturbed: Undisturbed) -> Iterator[str]:
    with serving_view(undisturbed.folder.store) as address:
        yield address


@pytest.fixture
def view(address: str) -> Iterator[Browser]:
    """A tab in which every error of a script is a failure: one that
    the content policy stops, too."""
    with browser(address) as view:
        errors: list[str] = []
        view.page.on("pageerror", lambda error: errors.append(str(error)))
        view.page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        yield view
        assert errors == []


def test_a_run_is_read_with_the_keyboard_alone(view: Browser) -> None:
    """From the runs to a token, and back."""
    keys, page = view.page.keyboard, view.page
    view.open("/")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    expect(page.locator("td.svg polyline")).to_be_visible()
    view.screenshot("view-runs")
    keys.press("?")
    expect(page.get_by_role("heading", name="Keys")).to_be_visible()
    keys.press("Escape")
    keys.press("j")
    keys.press("Enter")
    page.wait_for_url("**/runs/a")
    curves_are_drawn(view, 5)
    expect(page.get_by_text("complete", exact=True)).to_be_visible()
    view.screenshot("view-run")
    keys.press("j")
    keys.press("j")
    keys.press("Enter")
    page.wait_for_url("**/runs/a/iterations/6")  # the newest is 7
    view.screenshot("view-iteration")
    keys.press("ArrowLeft")
    page.wait_for_url("**/runs/a/iterations/5")
    keys.press("j")
    keys.press("Enter")
    page.wait_for_url("**/groups/*")
    expect(page.get_by_text("reference answer")).to_be_visible()
    view.screenshot("view-group")
    keys.press("j")
    keys.press("Enter")
    page.wait_for_url("**/rollouts/0")
    keys.press("ArrowRight")
    page.wait_for_url("**/rollouts/1")
    for up in ("**/groups/*", "**/iterations/5", "**/runs/a", f"{view.root}/"):
        keys.press("u")
        page.wait_for_url(up)


def curves_are_drawn(view: Browser, least: int) -> None:
    """At least so many plots, with lines in them."""
    expect(view.page.locator("[data-plots][data-drawn]").first).to_be_visible()
    assert view.page.locator(".plots .js-line").count() >= least


def test_tokens_change_colour_and_the_address_says_which(view: Browser, undisturbed: Undisturbed) -> None:
    store = undisturbed.folder.open_store()
    run = open_existing(store, "a")
    stored = iteration_groups(Library(store), run, 7).rollout(0, 2)
    view.open("/runs/a/iterations/7/groups/0/rollouts/2")
    tokens = view.page.locator("#tokens .t")
    expect(tokens).to_have_count(len(stored.completion_tokens))
    assert (
        "".join(text for text in tokens.all_inner_texts() if text != "·")
        .strip()
        .startswith(stored.completion.strip()[:10])
    )
    title = tokens.first.get_attribute("title") or ""
    assert f"logprob {stored.rollout_logprobs[0]:.3f}, gap " in title and title.endswith(", version 7, trained")
    redness = [
        float(colour)
        for colour in tokens.evaluate_all("all => all.map(one => getComputedStyle(one).getPropertyValue('--l'))")
    ]
    assert redness == [round(min(-float(logprob) / 5, 1.0), 2) for logprob in stored.rollout_logprobs]
    shown = tokens.first.evaluate("token => getComputedStyle(token).backgroundColor")
    view.screenshot("view-tokens")
    view.page.keyboard.press("c")
    assert view.page.url.endswith("?colour=gap")
    expect(view.page.get_by_text("full at 0.2 nats")).to_be_visible()
    view.page.keyboard.press("c")
    assert view.page.url.endswith("?colour=mask")
    assert tokens.first.evaluate("token => getComputedStyle(token).backgroundColor") != shown
    view.page.reload()
    expect(view.page.get_by_role("button", name="mask")).to_have_attribute("aria-pressed", "true")
    view.page.keyboard.press("ArrowLeft")
    view.page.wait_for_url("**/rollouts/1?colour=mask")


def test_a_text_is_searched_and_a_prompt_followed(view: Browser) -> None:
    view.open("/runs/a")
    view.page.keyboard.press("/")
    view.page.keyboard.type("backward")
    view.page.keyboard.press("Enter")
    view.page.wait_for_url("**/search?run=a&text=backward")
    expect(view.page.locator("mark").first).to_have_text("backward")
    view.page.keyboard.press("j")
    view.page.keyboard.press("Enter")
    view.page.get_by_text("the same prompt through the iterations").click()
    expect(view.page.get_by_role("heading", name="through the iterations")).to_be_visible()
    curves_are_drawn(view, 1)
    view.screenshot("view-prompt")


def test_answers_before_and_after_are_compared(view: Browser, undisturbed: Undisturbed) -> None:
    view.open("/runs/a/evaluations")
    expect(view.page.get_by_role("heading", name="Greedy answers of version 0 and of version 8")).to_be_visible()
    expect(view.page.locator("tr.row")).to_have_count(8)
    view.screenshot("view-evaluations")
    view.page.get_by_label("after").select_option("2")
    view.page.get_by_role("button", name="show").click()
    view.page.wait_for_url("**/evaluations?before=0&after=2&show=all")
    expect(view.page.get_by_role("heading", name="and of version 2")).to_be_visible()


def test_without_the_key_nothing_is_shown(undisturbed: Undisturbed) -> None:
    with serving_view(undisturbed.folder.store, RLPIPE_VIEW_KEY="sesame") as address, browser(address) as view:
        answer = view.page.request.get(address)
        assert answer.status == 401 and "/runs/a" not in answer.text()
        view.page.context.set_extra_http_headers({"Authorization": "Basic " + "OnNlc2FtZQ=="})  # :sesame
        view.open("/runs/a")
        expect(view.page.get_by_role("heading", name="a", exact=True)).to_be_visible()
