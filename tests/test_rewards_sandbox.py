"""The sandbox under every plan that this system allows, as root and as another user: what programs try, and what is left of it."""

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from rlpipe.rewards.sandbox import jail, linux, runner, seccomp
from rlpipe.rewards.sandbox.jail import Limits, Plan
from rlpipe.rewards.sandbox.runner import Outcome, Run, run
from tests.sandbox_world import HOSTILE, PATIENT, SYSTEM_PYTHON, attack, judge, marked, plans

ROOT = Path(__file__).parent.parent
NOBODY = 65534
PAIRS = [(sys.executable, plan) for plan in plans(sys.executable)]
if os.path.exists(SYSTEM_PYTHON) and (sys.version_info >= (3, 11)):
    PAIRS += [(SYSTEM_PYTHON, plan) for plan in plans(SYSTEM_PYTHON) if plan not in [known for _, known in PAIRS]]
# the filter of system calls is a second wall: without it the others must hold alone
FIRST = {pair[1].namespaces: pair for pair in reversed(PAIRS) if pair[1].seccomp}
WITHOUT_FILTER = {f"{pair[1].namespaces}, no filter": pair for pair in reversed(PAIRS) if not pair[1].seccomp}
ALL = {**FIRST, **WITHOUT_FILTER}


PLANS = [pytest.param(name, marks=() if name in ("full", "none") else pytest.mark.e2e) for name in ALL]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs(name: str, plan: str, tmp_path: Path) -> None:
    python, chosen = ALL[plan]
    judge(name, chosen, attack(python, chosen, name, tmp_path))


@pytest.fixture
def python_of_nobody() -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; the tests above ran as one")
    check = subprocess.run(
        [SYSTEM_PYTHON, "-c", f"import sys; assert sys.version_info >= (3, 11); open({str(ROOT / 'rlpipe/types.py')!r})"],
        user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False,
    )  # fmt: skip
    if check.returncode != 0:
        pytest.skip(f"{SYSTEM_PYTHON} is older than 3.11, or another user cannot read {ROOT}")
    return SYSTEM_PYTHON


@pytest.mark.e2e
def test_hostile_programs_as_an_ordinary_user(python_of_nobody: str) -> None:
    done = subprocess.run(
        [python_of_nobody, "-m", "tests.sandbox_world"],
        user=NOBODY, group=NOBODY, extra_groups=[], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for _, name, _ in found} == set(HOSTILE)
    assert not any(plan["drop"] for plan, _, _ in found)
    wrong: list[str] = []
    for plan, name, got in found:
        try:
            judge(name, Plan(**plan), got)
        except AssertionError as error:
            wrong.append(f"{plan}: {name}: {error}")
    assert not wrong, "\n".join(wrong)


SLEEPER = """
import os
if os.fork() == 0:
    os.setsid()
    os.execv("/usr/bin/sleep", ["sleep", "MARK"])
os.wait()
"""
STARTER = """
import json, sys
from rlpipe.rewards.sandbox.jail import Limits, Plan
from rlpipe.rewards.sandbox.runner import Run, run
python, plan, source = json.load(sys.stdin)
list(run(python, Plan(**plan), Limits(60.0, 60.0, 256, 4, 8), source, [Run(stdin="")]))
"""


@pytest.mark.parametrize("plan", PLANS)
def test_the_death_of_its_starter_ends_a_program(plan: str) -> None:
    python, chosen = ALL[plan]
    mark = f"{int.from_bytes(os.urandom(4), 'big') + 100000}"
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, start_new_session=True)
    assert starter.stdin is not None
    starter.stdin.write(json.dumps([python, asdict(chosen), SLEEPER.replace("MARK", mark)]).encode())
    starter.stdin.close()
    assert _becomes(lambda: len(marked(mark)) == 1)
    os.killpg(starter.pid, 9)  # as the pool does
    starter.wait()
    assert _becomes(lambda: marked(mark) == [])


def test_no_file_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    python, plan = PAIRS[0]
    assert [one.status for one in run(python, plan, PATIENT, "", [Run(stdin="")] * 2)] == ["ok", "ok"]
    next(run(python, plan, PATIENT, "", [Run(stdin="")] * 2))  # closed before its end
    assert before == set(os.listdir("/proc/self/fd"))


def test_programs_of_a_sandbox_share_no_files() -> None:
    python, plan = PAIRS[0]
    source = "import os; print(os.listdir('.')); open('left', 'w')"
    assert list(run(python, plan, PATIENT, source, [Run(stdin="")] * 2)) == [Outcome("ok", "[]\n")] * 2


def test_a_program_is_the_main_module_with_its_own_streams() -> None:
    python, plan = PAIRS[0]
    source = """
import atexit, os, sys, threading
def late():
    print(name, sys.argv)
name = __name__
atexit.register(lambda: print("at exit"))
print(sys.stdin.readline().strip(), sorted(set(os.environ) - {"LC_CTYPE"})[-1])
threading.Thread(target=late).start()
sys.exit()
"""
    (outcome,) = run(python, plan, PATIENT, source, [Run(stdin="Grüße\nzwei")])
    assert outcome == Outcome("ok", "Grüße TMPDIR\n__main__ ['program.py']\nat exit\n")


@pytest.mark.parametrize(
    ("source", "status"), [("import sys; sys.exit(1)", "error"), ("1/0", "error"), ("import os; os.abort()", "error"),
                           ("def f(:", "error"), ("", "ok"), ("import sys; sys.exit('no')", "error"), ("import os; os._exit(119)", "error")],
)  # fmt: skip
def test_status(source: str, status: str) -> None:
    python, plan = PAIRS[0]
    assert [one.status for one in run(python, plan, PATIENT, source, [Run(stdin="")])] == [status]


def test_results_do_not_depend_on_the_hash_seed() -> None:
    python, plan = PAIRS[0]
    outputs = {next(run(python, plan, PATIENT, "print(set('abcdefgh'))", [Run(stdin="")])).output for _ in range(3)}
    assert len(outputs) == 1


def test_all_runs_together_have_a_limit() -> None:
    python, plan = PAIRS[0]
    limits = Limits(time_s=30.0, total_s=0.5, memory_mb=256, processes=4, files_mb=8)
    started_s = time.monotonic()
    outcomes = list(run(python, plan, limits, "while True: pass", [Run(stdin="")] * 3))
    assert [one.status for one in outcomes] == ["timeout"] * 3
    assert time.monotonic() - started_s < 25


def test_protections_are_measured() -> None:
    assert runner.strongest_plan(sys.executable) == PAIRS[0][1]
    assert runner._probe(*PAIRS[0]) == []
    assert set(runner._probe(sys.executable, Plan(False, False, "none", 0, False))) == {
        "programs reach the network", "programs read what this user may read", "programs can signal this user's processes",
    }  # fmt: skip


def test_an_interpreter_may_lie_where_programs_have_their_tmp() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        venv.create(folder, symlinks=True)
        plan = runner.strongest_plan(f"{folder}/bin/python")
        assert plan == PAIRS[0][1] and runner._probe(f"{folder}/bin/python", plan) == []


CONTAINER = """
import json, sys
from dataclasses import asdict
from rlpipe.rewards.sandbox import linux, runner, seccomp
seccomp.DENIED = {"unshare": seccomp.DENIED["unshare"]}
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.filter_syscalls(seccomp.filter_program(False))
plan = runner.strongest_plan(sys.argv[1])
print(json.dumps([plan.namespaces, plan.drop, runner._probe(sys.argv[1], plan)]))
"""


@pytest.mark.skipif(not seccomp.supported(), reason="refuses namespaces as containers do, with a filter of system calls")
def test_where_namespaces_are_refused(python_of_nobody: str) -> None:
    command = [python_of_nobody, "-c", CONTAINER, python_of_nobody]
    kept: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "env": {"PYTHONPATH": str(ROOT)}}
    as_root = subprocess.run(command, **kept)
    assert json.loads(as_root.stdout) == ["none", True, []]
    as_nobody = subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], **kept)
    assert json.loads(as_nobody.stdout) == ["none", False, [] if linux.landlock_version() >= 6 else ANY]


def test_an_interpreter_that_does_not_start_is_refused() -> None:
    with pytest.raises(ValueError, match="python = '/no/python' does not start"):
        runner.strongest_plan("/no/python")


def test_readable_paths_hold_no_folder_twice(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    paths = jail.readable_paths([str(tmp_path), str(tmp_path / "inner"), "/usr/local"])
    assert str(tmp_path) in paths
    assert str(tmp_path / "inner") not in paths
    assert "/usr/local" not in paths


def _becomes(condition, timeout_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
