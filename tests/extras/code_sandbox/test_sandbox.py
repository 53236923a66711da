"""The sandbox as root, as root in a container and as another user: what
programs try, and what is left of it."""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest

from rlpipe.base.errors import UserError
from rlpipe.extras.code_sandbox import confinement
from rlpipe.extras.code_sandbox.runner import Outcome, check_interpreter, run
from tests.deadlines import DEADLINE_S, PIPELINE_S, SHORT_S
from tests.paths import ROOT
from tests.sandbox_world import HOSTILE, KILLED, PATIENT, SYSTEM_PYTHON, attack, judge, kill_above_a_daemon

NOBODY = 65534
PYTHON = sys.executable
EMPTY = ("stdin", "")
WORLD = "root" if os.geteuid() == 0 else "user"
LONG = "writes on and on"  # ten seconds of a processor


@pytest.mark.parametrize(
    "name", [*(name for name in HOSTILE if name != LONG), pytest.param(LONG, marks=pytest.mark.slow)]
)
def test_hostile_programs(name: str, tmp_path: Path) -> None:
    judge(name, WORLD, attack(PYTHON, name, tmp_path))


@pytest.fixture
def python_of_nobody() -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; the tests above ran as one")
    check = subprocess.run(
        [SYSTEM_PYTHON, "-c",
         f"import sys; assert sys.version_info >= (3, 11); open({str(ROOT / 'rlpipe/base/printable.py')!r})"],
        user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False,
    )  # fmt: skip
    if check.returncode != 0:
        pytest.skip(f"{SYSTEM_PYTHON} is older than 3.11, or another user cannot read {ROOT}")
    return SYSTEM_PYTHON


@pytest.mark.e2e  # a minute of processes
@pytest.mark.parametrize("world", ["container", "user"])
def test_hostile_programs_in_another_world(world: str, python_of_nobody: str) -> None:
    identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if world == "user" else {}
    done = subprocess.run(
        [python_of_nobody, "-m", "tests.sandbox_world", *(["container"] if world == "container" else [])],
        cwd=ROOT, capture_output=True, text=True, timeout=PIPELINE_S, check=False, **identity,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (name_of_confinement, is_full), results = json.loads(done.stdout)
    uid = "no uid" if world == "user" else "a uid"
    assert name_of_confinement.endswith(f"limits, {uid} of their own, no process namespace") and not is_full
    assert set(results) == set(HOSTILE)
    wrong: list[str] = []
    for name, got in results.items():
        try:
            judge(name, world, got)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("killed", KILLED)
def test_a_kill_above_a_program_ends_its_daemons(killed: str) -> None:
    time_s = SHORT_S if WORLD == "user" and killed.startswith("upper") else DEADLINE_S  # there the lower one goes on
    kill_above_a_daemon(PYTHON, killed, time_s)


def test_no_file_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert [one.status for one in run(PYTHON, PATIENT, "", [EMPTY] * 2)] == ["ok", "ok"]
    next(run(PYTHON, PATIENT, "", [EMPTY] * 2))  # closed before its end
    assert before == set(os.listdir("/proc/self/fd"))


def test_programs_of_a_sandbox_share_no_files() -> None:
    source = "import os; print(os.listdir('.')); open('left', 'w')"
    assert list(run(PYTHON, PATIENT, source, [EMPTY] * 2)) == [Outcome("ok", "[]\n")] * 2


def test_a_program_is_the_main_module_with_its_own_streams() -> None:
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
    (outcome,) = run(PYTHON, PATIENT, source, [("stdin", "Grüße\nzwei")])
    assert outcome == Outcome("ok", "Grüße TMPDIR\n__main__ ['program.py']\nat exit\n")


@pytest.mark.parametrize(
    ("source", "status"), [("import sys; sys.exit(1)", "error"), ("1/0", "error"), ("import os; os.abort()", "error"),
                           ("def f(:", "error"), ("", "ok"), ("import sys; sys.exit('no')", "error"),
                           ("import os; os._exit(119)", "error")],
)  # fmt: skip
def test_status(source: str, status: str) -> None:
    assert [one.status for one in run(PYTHON, PATIENT, source, [EMPTY])] == [status]


def test_results_do_not_depend_on_the_hash_seed() -> None:
    outputs = {next(run(PYTHON, PATIENT, "print(set('abcdefgh'))", [EMPTY])).output for _ in range(3)}
    assert len(outputs) == 1


def test_all_runs_together_have_a_limit() -> None:
    # one that had its own time would hang
    limits = PATIENT._replace(total_s=0.5)  # short: all together have it
    outcomes = list(run(PYTHON, limits, "while True: pass", [EMPTY] * 3))
    assert [one.status for one in outcomes] == ["timeout"] * 3


def test_a_confinement_that_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "TRIAL", "print('a program can read other files')")
    with pytest.raises(UserError, match=r"no program can be run with .*\(a program can read other files\)"):
        check_interpreter.__wrapped__(PYTHON)


@pytest.mark.parametrize(("version", "uids", "reason"), [(0, range(0), "no Landlock"), (0, range(9), "no Landlock"),
                         (5, range(0), "version 5, and an ordinary user needs 6"), (1, range(9), ""),
                                                         (6, range(0), "")])  # fmt: skip
def test_what_a_system_must_have(version: int, uids: range, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "landlock_version", lambda: version)
    monkeypatch.setattr(confinement, "free_uids", lambda: uids)
    assert reason in confinement.missing() if reason else confinement.missing() == ""
    if reason:
        with pytest.raises(UserError, match=rf"cannot confine programs: .*{reason}.*remote = 1.0"):
            check_interpreter.__wrapped__(PYTHON)


def test_an_interpreter_may_lie_where_programs_have_their_tmp() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        venv.create(folder, symlinks=True)
        assert check_interpreter(f"{folder}/bin/python") == check_interpreter(PYTHON)


@pytest.mark.skipif(os.geteuid() != 0, reason="a user does not see what only root may enter")
def test_an_interpreter_may_lie_where_only_root_may_enter() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # of mode 0700
        (Path(folder) / "secret").write_text("the secret")
        os.chmod(Path(folder) / "secret", 0o644)
        os.mkdir(f"{folder}/python", 0o755)
        venv.create(f"{folder}/python", symlinks=True)
        source = (
            f"import os; print(os.listdir({folder!r} + '/python/bin') != [], os.path.exists({folder!r} + '/secret'))"
        )
        assert list(run(f"{folder}/python/bin/python", PATIENT, source, [EMPTY])) == [Outcome("ok", "True False\n")]


def test_an_interpreter_that_does_not_start_is_refused() -> None:
    with pytest.raises(ValueError, match="python = '/no/python' does not start"):
        check_interpreter("/no/python")


def test_the_sandbox_needs_nothing_but_the_standard_library() -> None:
    """Its supervisor starts with each rollout, under whatever interpreter there is: an import that
    is not at hand would be seen there only."""
    program = (
        "import sys, rlpipe.extras.code_sandbox.runner; print(sorted({'pydantic', 'numpy', 'pyarrow', "
        "'httpcore'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert ended.stdout.strip() == "[]"
