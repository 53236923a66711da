"""Users' code, which a policy may steer, does not find a secret: not in its environment, and not in
that of any other process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.config.secrecy import Secrets, named_variables
from rlpipe.config.training import RlConfig
from rlpipe.extras.agents.pool import AgentFault, Agents, check_agent
from rlpipe.extras.environments.pool import EnvironmentPool
from rlpipe.processes.kernel import LANDLOCK_SIGNALS, landlock_version
from rlpipe.processes.pool import code_environment
from rlpipe.records.prompt import RewardPrompt
from rlpipe.rewards.pool import RewardPool
from rlpipe.rewards.score import unsampled_facts
from tests.agent_world import SpokenPool, rollout_of, tokenizer_in
from tests.deadlines import DEADLINE_S, until
from tests.paths import ROOT

PLANTED = {
    name: f"planted-{name.lower()}-4711"
    for name in (
        "RLPIPE_SERVICE_KEY", "RLPIPE_VIEW_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
        "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING",
        "PREFECT_SERVER_API_AUTH_STRING", "HF_TOKEN", "OPENAI_API_KEY", "DB_PASSWD",
        "RLPIPE_SECRET_GRADER",  # of a Secret block
        "GRADER", "GRADER_PLACE",  # that only the arguments of rewards call secrets
    )
} | {"MLFLOW_TRACKING_URI": "https://user:planted-mlflow-4711@host/"}  # fmt: skip
HARMLESS = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "TOKENIZERS_PARALLELISM": "false", "MY_SETTING": "kept"}
ARGS = {"remote": {"url": "$GRADER_PLACE", "key_env": "GRADER"}}
SPY = '''
import json, os, pathlib, sys

def seen():
    """All that can be read of environments: one's own, and those of other processes."""
    found = [repr(dict(os.environ))]
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            pass
    return "\\n".join(found)

def reward(prompt, completion, key_env=""):
    found = repr(dict(os.environ)) if os.geteuid() == 0 else seen()  # root keeps the right to mount there, and to read
    raise KeyError(os.environ.get(key_env) or [part for part in found.replace("'", "\\n").split("\\n") if "planted" in part])

class World:
    def start(self, prompt):
        return [{"role": "user", "content": seen()}]
    def step(self, completion):
        raise KeyError

def agent(prompt, client):
    raise KeyError([part for part in seen().replace("'", "\\n").split("\\n") if "planted" in part])

if __name__ == "__main__":
    print(seen(), file=sys.stderr)
    sys.exit(1)
'''  # noqa: E501
PROMPT: RewardPrompt = {"prompt_id": "x", "messages": [{"role": "user", "content": "x"}], "answer": "x", "metadata": {}}
needs_landlock = pytest.mark.skipif(
    landlock_version() < LANDLOCK_SIGNALS, reason="other processes' environments are closed from Linux 6.12 on"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spy.py").write_text(SPY)
    monkeypatch.chdir(tmp_path)
    for name, value in {**PLANTED, **HARMLESS}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture(autouse=True)
def holder(folder: Path) -> Iterator[None]:
    """A process that was started with all of them, as the flow is: the
    same user reads that in /proc."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        seen = until(Path(f"/proc/{process.pid}/environ").read_text)
        assert len(secret_in(seen)) == len(PLANTED)
        yield
    finally:
        process.kill()
        process.wait()


def secret_in(text: str) -> list[str]:
    return [name for name in PLANTED if f"planted-{name.lower()}-4711" in text] + ["uri"] * (
        "planted-mlflow-4711" in text
    )


def test_what_code_gets_of_an_environment() -> None:
    given = code_environment(Secrets(["HF_TOKEN"], named_variables(ARGS)))
    assert (
        secret_in(repr(given)) == ["HF_TOKEN"]
        and HARMLESS.items() <= given.items()
        and given["PATH"] == os.environ["PATH"]
    )
    assert named_variables(
        {
            "a:f": {"key_env": "A", "other": "$B", "list": ["$C"], "cost": "5$"},
            "b": {"key_env": "", "url": {"block": "my-url"}, "other": {"block": "no"}},
        }
    ) == {"A", "B", "C", "RLPIPE_SECRET_MY_URL"}
    with pytest.raises(UserError, match=r"rl\.pass_environment: NOT_SET is not set"):
        check_agent(RlConfig(agent="spy:agent", pass_environment=["NOT_SET"]))


@pytest.mark.slow
@needs_landlock
@pytest.mark.parametrize("agent", ["python spy.py", "spy:agent"])
async def test_an_agent_that_prints_all_environments_shows_no_secret(agent: str, tmp_path: Path) -> None:
    agents = Agents(RlConfig(agent=agent, reward_args=ARGS, agents_max=1), tokenizer_in(tmp_path / "tokenizer"))
    try:
        with pytest.raises(AgentFault) as fault:
            await agents.run(rollout_of(SpokenPool(agents._endpoint._openai.tokenizer)), PROMPT)
    finally:
        await agents.close()
    assert fault.value.reason == "agent_error" and secret_in(str(fault.value)) == []


@needs_landlock
async def test_an_environment_shows_no_secret_but_what_is_passed() -> None:
    for secrets, seen in (
        (Secrets((), named_variables(ARGS)), []),
        (Secrets(["DB_PASSWD"], named_variables(ARGS)), ["DB_PASSWD"]),
    ):
        pool = EnvironmentPool("spy:World", {}, 1, 60.0, environment=code_environment(secrets))
        try:
            [message] = await pool.open(PROMPT).start()
        finally:
            await pool.close()
        assert secret_in(message["content"]) == seen and "MY_SETTING" in message["content"]


@needs_landlock
def test_a_reward_function_sees_the_key_that_its_own_arguments_name_and_no_other() -> None:
    item = {"prompt": PROMPT, "completion": "x", "rollout": unsampled_facts("x")}
    of_block = {"key_env": {"block": "grader"}}
    for args, seen in (
        ({}, []),
        ({"key_env": "GRADER"}, ["GRADER"]),
        (of_block, ["RLPIPE_SECRET_GRADER"]),
    ):
        rewards, every = {"spy:reward": 1.0}, {"spy:reward": args}
        with RewardPool(
            rewards, every, workers=1, timeout_s=DEADLINE_S, secrets=Secrets((), named_variables(ARGS))
        ) as pool:
            [score] = pool.score([item])  # type: ignore[list-item]
        assert score.reason == "reward_error" and secret_in(score.message) == seen, score.message


@needs_landlock
def test_a_process_that_is_secluded_reads_and_signals_itself_and_its_children_only() -> None:
    """Also by root, and by what it starts, whatever that does."""
    code = (
        "import os, subprocess, sys; from rlpipe.processes.kernel import leave_rights, seclude; "
        "assert seclude() and seclude(); leave_rights(); leave_rights()\n"
        "child = subprocess.Popen(['sleep', '60']); open(f'/proc/{child.pid}/environ').read(); "
        "child.terminate(); child.wait()\n"
        "open('/proc/self/environ').read(); os.kill(os.getpid(), 0)\n"
        "for act in (lambda: open(f'/proc/{os.getppid()}/environ').read(), lambda: "
        "open(f'/proc/{os.getppid()}/mem'), lambda: os.kill(os.getppid(), 0)):\n"
        "    try: act()\n"
        "    except PermissionError: print('refused')\n"
        "print(subprocess.run(['sh', '-c', f'cat /proc/{os.getppid()}/environ'], capture_output=True).returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["refused"] * 3 + ["1"], done.stderr
    assert json.dumps(done.stderr) == '""'
