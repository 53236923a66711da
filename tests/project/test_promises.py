"""promises.toml: what README promises is in README, and the tests that
hold it are there and run in CI."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

PROMISES = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())["promise"]


def test_every_promise_stands_in_the_readme() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert [promise["says"] for promise in PROMISES if promise["says"] not in readme] == []


@pytest.mark.slow
def test_every_promise_is_held_by_tests_that_run_in_ci() -> None:
    held = {test for promise in PROMISES for test in promise["tests"]}
    files = sorted({test.split("::")[0] for test in held})
    in_ci = ["-m", "not learning and not soak and not spare and not nightly", *files]
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *in_ci],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    ids = collected.stdout.splitlines()
    assert all(promise["tests"] for promise in PROMISES)
    assert [
        test
        for test in sorted(held)
        if not any(each == test or each.startswith((f"{test}[", f"{test}::")) for each in ids)
    ] == []
