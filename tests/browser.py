"""Prefect's UI in a headless Chromium, as a user sees it; every
screenshot stays in tests/output/."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

OUTPUT = ROOT / "tests" / "output"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")  # the system's: Playwright's own is no package
SECOND = 1000.0  # Playwright counts milliseconds
WAIT_MS = DEADLINE_S * SECOND


class Browser:
    """A tab of the UI at `root`."""

    def __init__(self, page: Page, root: str) -> None:
        self.page, self.root = page, root

    def open(self, path: str) -> None:
        self.page.goto(f"{self.root}{path}")

    def screenshot(self, name: str) -> None:
        """What is on the screen now, in tests/output/NAME.png."""
        self.page.wait_for_timeout(SECOND)  # the timeline is drawn a little later than the page
        self.page.screenshot(path=OUTPUT / f"{name}.png")

    def field(self, name: str) -> Locator:
        """The field of the form with this name (of several, the first):
        its label, description and input."""
        return self.page.locator(f'.schema-form-property:has(> .p-label__header :text-is("{name} (Optional)"))').first

    def fill(self, name: str, value: str) -> None:
        self.field(name).locator("input, textarea").first.fill(value)

    def tab(self, name: str) -> None:
        self.page.locator(".p-tab-navigation, .p-tabs").get_by_text(name, exact=True).first.click()

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def link(self, name: str) -> Locator:
        return self.page.get_by_role("link", name=name, exact=True)

    def state(self) -> Locator:
        """The state in the heading of a run's page."""
        return self.page.locator(".state-badge").first

    def rest(self) -> str:
        """Leaves the page, whose timeline draws all the time, for an empty
        one; the path to come back to."""
        path = self.page.url.removeprefix(self.root)
        self.page.goto("about:blank")
        return path


@contextlib.contextmanager
def browser(root: str) -> Iterator[Browser]:
    """A new tab of a headless Chromium."""
    OUTPUT.mkdir(exist_ok=True)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to sandbox for root
    with sync_playwright() as playwright:
        process = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = process.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        told = Browser(page, root)
        try:
            yield told
        finally:
            told.screenshot("last")  # where a test failed
            process.close()
