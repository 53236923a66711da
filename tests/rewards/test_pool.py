"""The pool: whatever a reward function does, every rollout gets a score or a reason, and nothing
hangs or stays behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlpipe.base.errors import EngineError, UserError
from rlpipe.processes.child import has_ended
from rlpipe.processes.worker import Worker
from rlpipe.rewards import process as process_module
from rlpipe.rewards.pool import RewardPool, check_rewards, score
from rlpipe.rewards.process import Fault, ProcessScorer, RewardLost
from rlpipe.rewards.score import Score, score_of, scored
from tests.deadlines import DEADLINE_S, PIPELINE_S, SHORT_S, until
from tests.living import is_alive, until_gone

REWARDS = '''
import os, signal, sys, time

print("importing prints")

def behave(prompt, completion):
    """Does what the completion says."""
    print("scoring prints", flush=True)
    if completion == "raise": raise KeyError("gone")
    if completion == "sleep": time.sleep(600)
    if completion == "spin":
        while True: pass
    if completion == "exit": sys.exit(3)
    if completion == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if completion == "killed once" and not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "killed once": return 1.0
    if completion == "nan": return float("nan")
    if completion == "inf": return float("inf")
    if completion == "none": return None
    if completion == "text": return "1.0"
    if completion == "empty": return {}
    if completion == "badpart": return {"a": 1.0, "b": None}
    if completion == "parts": return {"a": 1.0, "b": 0.5}
    if completion == "stdin": return len(sys.stdin.read())
    if completion == "bool": return True
    if completion == "big": return len(prompt["answer"])
    if completion == "pid": return os.getpid()
    if completion == "child": os.system("sleep 600 & echo $! > child.pid; sleep 600")
    if completion == "orphan":
        os.system("sleep 600 & echo $! > child.pid")
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "at": open("at", "w").close()
    if completion == "at": return 1.0
    if completion == "stop the owner":
        open("asked", "w").close()
        while not os.path.exists("stopped"):
            time.sleep(0.01)
        return 1.0
    return float(completion)

def half(prompt, completion):
    return 0.5
'''


FACTS = {"num_tokens": 3, "finish_reason": "stop", "environment": None}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "behaviours.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pool(folder: Path) -> Iterator[RewardPool]:
    with RewardPool({"behaviours:behave": 2.0, "behaviours:half": 1.0}, workers=2, timeout_s=DEADLINE_S) as opened:
        yield opened


@pytest.fixture
def hasty(folder: Path) -> Iterator[RewardPool]:
    """One that gives up soon."""
    with RewardPool({"behaviours:behave": 2.0, "behaviours:half": 1.0}, workers=2, timeout_s=SHORT_S) as opened:
        yield opened


def items(*completions: str, answer: str = "x") -> list[dict[str, Any]]:
    prompt = {"prompt_id": "set/0", "messages": [], "answer": answer, "metadata": {}}
    return [
        {"prompt": prompt, "completion": text, "rollout": {**FACTS, "turns": [{"role": "assistant", "content": text}]}}
        for text in completions
    ]


def test_reward_is_the_weighted_sum_of_the_parts(pool: RewardPool) -> None:
    assert pool.score(items("1", "parts", "bool")) == [
        Score(2.5, {"behave": 1.0, "half": 0.5}),
        Score(3.5, {"behave_a": 1.0, "behave_b": 0.5, "half": 0.5}),
        Score(2.5, {"behave": 1.0, "half": 0.5}),
    ]
    assert pool.last_error is None
    assert pool.score([]) == []


@pytest.mark.slow
def test_every_misbehaviour_has_its_reason_and_harms_no_other(hasty: RewardPool) -> None:
    bad = {
        "raise": "reward_error", "sleep": "reward_timeout", "spin": "reward_timeout",
        "exit": "reward_error", "kill": "reward_crash",
        "nan": "reward_invalid", "inf": "reward_invalid", "none": "reward_invalid",
        "text": "reward_invalid", "empty": "reward_invalid",
        "badpart": "reward_invalid",
    }  # fmt: skip
    completions = [name for index, kind in enumerate(bad) for name in (str(index), kind)]
    scores = hasty.score(items(*completions, "7"))
    assert [score.reason for score in scores[1::2]] == list(bad.values())
    assert [score.reward for score in scores[::2]] == [2.0 * index + 0.5 for index in [*range(len(bad)), 7]]
    assert hasty.last_error
    assert [score.reward for score in hasty.score(items("1", "stdin"))] == [2.5, 0.5]


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("raise", ["behaviours:behave", "KeyError", "gone", "behaviours.py:"]),
        ("sleep", ["set/0", f"rl.reward_timeout_s={SHORT_S:g}"]),
        ("exit", ["behaviours:behave", "SystemExit: 3", "behaviours.py:"]),
        ("text", ["behave is '1.0'", "finite number"]),
    ],
)
def test_the_first_fault_is_told(
    hasty: RewardPool, completion: str, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    hasty.score(items("1", completion))
    assert hasty.last_error is not None
    assert all(part in hasty.last_error for part in said), hasty.last_error
    assert "1 of 2 rollouts" in caplog.text


def test_large_prompts_do_not_block_behind_a_stuck_rollout(folder: Path) -> None:
    with RewardPool({"behaviours:behave": 1.0}, workers=1, timeout_s=SHORT_S) as pool:
        scores = pool.score(items("sleep", *["big"] * 40, answer="y" * 200_000))
    assert [score.reason for score in scores[:1]] == ["reward_timeout"]
    assert {score.reward for score in scores[1:]} == {200_000.0}


@pytest.mark.slow
def test_a_reward_that_never_answers_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "FAILURES_MAX", 3)
    with RewardPool({"behaviours:behave": 1.0}, workers=1, timeout_s=PIPELINE_S) as pool:
        reasons = Counter(score.reason for score in pool.score(items(*["kill"] * 5000)))
        assert reasons == {"reward_crash": 1, "reward_unavailable": 4999}, "those that were not asked are not to blame"
        assert [score.reward for score in pool.score(items("1", *["kill"] * 4, "2"))] == [
            1.0,
            None,
            None,
            None,
            None,
            2.0,
        ]


def test_quick_functions_get_many_rollouts_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(monkeypatch, quick_s=100 * DEADLINE_S)
    with RewardPool({"behaviours:behave": 1.0}, workers=4, timeout_s=DEADLINE_S) as pool:
        pool.score(items(*["1"] * 100))
        assert asked[0] == 1 and sum(asked) == 100, "how quick it is is not known at first"
        assert 1 < max(asked) <= 25, "each process gets its share"
        asked.clear()
        assert [score.reward for score in pool.score(items(*map(str, range(50))))] == [float(n) for n in range(50)]
        assert sum(asked) == 50 and len(asked) < 50


def test_slow_functions_get_one_rollout_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(monkeypatch)
    (folder / "slow.py").write_text("import time\ndef f(completion, prompt):\n    time.sleep(0.05)\n    return 1.0\n")
    with RewardPool({"slow:f": 1.0}, workers=2, timeout_s=DEADLINE_S) as pool:
        pool.score(items(*["1"] * 8))
    assert asked == [1] * 8


@pytest.mark.parametrize(("bad", "reason"), [("sleep", "reward_timeout"), ("kill", "reward_crash")])
def test_of_rollouts_that_were_asked_together_only_the_bad_one_has_no_score(
    folder: Path, bad: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(monkeypatch, quick_s=100 * DEADLINE_S)
    with RewardPool({"behaviours:behave": 1.0}, workers=1, timeout_s=2 * SHORT_S) as pool:
        pool.score(items(*["1"] * 100))
        asked.clear()
        scores = pool.score(items("1", "2", bad, "3", "4"))
    assert [(score.reward, score.reason) for score in scores] == [
        (1.0, None), (2.0, None), (None, reason), (3.0, None), (4.0, None),
    ]  # fmt: skip
    assert max(asked) > 1


def requests(monkeypatch: pytest.MonkeyPatch, quick_s: float | None = None) -> list[int]:
    """The number of rollouts of each request from here on; what takes `quick_s` counts as quick."""
    asked: list[int] = []
    monkeypatch.setattr(process_module, "BATCH_S", quick_s or process_module.BATCH_S)
    ask = ProcessScorer._ask

    async def counted(self: ProcessScorer, worker: Worker, batch: list[int]) -> Fault | None:
        asked.append(len(batch))
        return await ask(self, worker, batch)

    monkeypatch.setattr(ProcessScorer, "_ask", counted)
    return asked


def test_a_rollout_whose_process_was_killed_once_is_scored_again(pool: RewardPool) -> None:
    scores = pool.score(items("1", "killed once", "2"))
    assert [score.reward for score in scores] == [2.5, 2.5, 4.5]


def test_threads_take_turns(pool: RewardPool) -> None:
    found: dict[int, list[float | None]] = {}

    def work(number: int) -> None:
        found[number] = [score.reward for score in pool.score(items(*[str(number)] * 50))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    assert found == {number: [2.0 * number + 0.5] * 50 for number in range(4)}


# while a rollout is scored, and while a process takes over
@pytest.mark.slow
@pytest.mark.parametrize("completion", ["spin", "kill"])
@pytest.mark.parametrize("after_s", [0.1, 0.4])
def test_what_is_being_scored_when_the_pool_closes_ends_and_records_no_fault(
    folder: Path, completion: str, after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "FAILURES_MAX", 10**6)
    others = {child.pid for child in psutil.Process().children(recursive=True)}  # a server of other tests
    pool = RewardPool({"behaviours:behave": 1.0}, workers=2, timeout_s=PIPELINE_S)
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(pool.score, items("at", *[completion] * 5000))
        until((folder / "at").exists)
        time.sleep(after_s)
        workers = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in others]
        pool.close()
        with pytest.raises(EngineError, match="closed while there was something to score"):
            scoring.result(timeout=DEADLINE_S)
    for pid in workers:
        until_gone(pid)
    with pytest.raises(EngineError, match="closed"):
        pool.score(items("1"))


def test_close_and_timeout_leave_no_process(folder: Path) -> None:
    with RewardPool({"behaviours:behave": 1.0}, workers=1, timeout_s=SHORT_S) as pool:
        assert pool.score(items("child"))[0].reason == "reward_timeout"
        until_gone(int((folder / "child.pid").read_text()))
        worker = pool.score(items("pid"))[0].reward
        assert worker is not None
        assert is_alive(int(worker))
    until_gone(int(worker))


def test_a_reward_that_dies_takes_its_children_with_it(folder: Path) -> None:
    with RewardPool({"behaviours:behave": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
        assert pool.score(items("orphan"))[0].reason == "reward_crash"
        until_gone(int((folder / "child.pid").read_text()))


def test_a_reward_that_does_not_load_again_is_no_fault_of_the_rollouts(folder: Path) -> None:
    with RewardPool({"behaviours:behave": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
        (folder / "behaviours.py").write_text("raise MemoryError('no room')")
        with pytest.raises(RewardLost, match="no room"):
            pool.score(items("kill", "1.0000", "2.0000"))


KILLED_WHILE_IT_LOADS = """
import os, signal
from pathlib import Path

if len(list(Path(".").glob("load-*"))) < {num_kills}:
    Path(f"load-{{os.getpid()}}").touch()
    os.kill(os.getpid(), signal.SIGKILL)

def f(completion, answer):
    return 2.0
"""


def test_one_that_is_killed_while_it_loads_is_loaded_once_more(folder: Path) -> None:
    (folder / "killed_once.py").write_text(KILLED_WHILE_IT_LOADS.format(num_kills=1))
    with RewardPool({"killed_once:f": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
        assert pool.score(items("1"))[0].reward == 2.0
    (folder / "killed_always.py").write_text(KILLED_WHILE_IT_LOADS.format(num_kills=9))
    with pytest.raises(UserError, match="ended with code -9"):
        RewardPool({"killed_always:f": 1.0}, workers=1, timeout_s=DEADLINE_S)
    assert len(list(folder.glob("load-*"))) == 1 + 2


def test_an_answer_in_time_counts_when_the_owner_was_stopped(folder: Path) -> None:
    script = (
        "from rlpipe.rewards.pool import RewardPool\n"
        f"pool = RewardPool({{'behaviours:behave': 1.0}}, workers=1, timeout_s={SHORT_S})\n"
        "prompt = {'prompt_id': 'a', 'answer': None}\n"
        "print(pool.score([{'prompt': prompt, 'completion': 'stop the owner', 'rollout': {}}])[0])\n"
        "pool.close()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        until((folder / "asked").exists, running=owner)
        owner.send_signal(signal.SIGSTOP)
        (folder / "stopped").touch()
        time.sleep(SHORT_S + 0.5)
        owner.send_signal(signal.SIGCONT)
        said, _ = owner.communicate(timeout=DEADLINE_S)
    assert said.startswith("Score(reward=1.0"), said


@pytest.mark.parametrize("completion", ["1", "spin"])
def test_killing_the_owner_leaves_no_worker(folder: Path, monkeypatch: pytest.MonkeyPatch, completion: str) -> None:
    script = (
        "from rlpipe.rewards.pool import RewardPool\n"
        "import time, rlpipe.rewards.worker\n"
        f"pool = RewardPool({{'behaviours:behave': 1.0}}, workers=1, timeout_s={DEADLINE_S})\n"
        "prompt = {'prompt_id': 'a', 'answer': None}\n"
        "print(int(pool.score([{'prompt': prompt, 'completion': 'pid', 'rollout': {}}])[0].reward), flush=True)\n"
        f"pool.score([{{'prompt': prompt, 'completion': {completion!r}, 'rollout': {{}}}}])\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    time.sleep(0.3)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until_gone(worker)


@pytest.mark.slow
def test_bad_names_are_refused_where_the_pool_is_made(folder: Path) -> None:
    check_rewards({"math": 1.0, "behaviours:half": 0.5}, {}, 10.0)
    assert "behaviours" not in sys.modules
    (folder / "broken_here.py").write_text("raise RuntimeError('half a file')\n")
    (folder / "leaves_here.py").write_text("import os\nos._exit(4)\n")
    for rewards, said in [
        ({"nope": 1.0}, "'nope'"),
        ({"nowhere.at_all:f": 1.0}, "nowhere.at_all"),
        ({"broken_here:f": 1.0}, "half a file"),
        ({"leaves_here:f": 1.0}, "ended with code"),
    ]:
        with pytest.raises(UserError, match=said):
            check_rewards(rewards, {}, 10.0)
    with pytest.raises(UserError, match="has no 'nope'"):
        RewardPool({"behaviours:nope": 1.0}, workers=1, timeout_s=DEADLINE_S)
    assert os.getcwd() == str(folder)


# sympy looks for the value of each for 5 to 20 s, and then gives up
INTEGRALS = (rf"\int_0^1 \frac{{\sin(x^{power})}}{{x^{{x}}+\cos(x^3)}} dx" for power in range(2, 10))
HOSTILE_FORMULA = rf"\boxed{{{' + '.join(INTEGRALS)}}}"


@pytest.mark.parametrize(
    ("name", "args", "right", "wrong", "malformed", "hostile"),
    [
        (
            "format",
            {"pattern": "(a+)+b"},
            "aab",
            "aa",
            "",
            "a" * 60,
        ),  # a regular expression that holds the GIL for years
        ("math", {}, "\\boxed{5}", "\\boxed{6}", "\\boxed{", HOSTILE_FORMULA),
        (
            "deepscaler",
            {},
            "</think>\\boxed{5}",
            "</think>\\boxed{6}",
            "</think>",
            f"</think>{HOSTILE_FORMULA}",
        ),
    ],
)
def test_a_hostile_completion_costs_its_own_rollout_alone(
    name: str, args: dict[str, Any], right: str, wrong: str, malformed: str, hostile: str
) -> None:
    with RewardPool(
        {name: 1.0}, {name: args}, workers=1, timeout_s=2 * SHORT_S
    ) as pool:  # the second process imports again
        pool.score(items(right, answer="5"))  # imports
        scores = pool.score(items(hostile, right, wrong, malformed, answer="5"))
    assert [score.reward for score in scores] == [None, 1.0, 0.0, 0.0]
    assert scores[0].reason in ("reward_timeout", "reward_crash")


def test_facts_reach_the_functions_that_want_them(folder: Path) -> None:
    (folder / "informed.py").write_text("def told(prompt, completion, rollout): return rollout['num_tokens']\n")
    rewards = {"informed:told": 1.0, "length": 1.0, "environment": 1.0, "behaviours:half": 1.0}
    with RewardPool(rewards, {"length": {"max": 3}}, workers=1, timeout_s=DEADLINE_S) as pool:
        rollouts = [
            {**items("x")[0], "rollout": {"num_tokens": 3, "finish_reason": "stop", "environment": said}}
            for said in ({"reward": 0.25}, None, {"reward": None})
        ]
        scores = pool.score(rollouts)
    assert scores[0] == Score(4.75, {"told": 3.0, "length": 1.0, "environment": 0.25, "half": 0.5})
    assert [score.reason for score in scores[1:]] == ["reward_error", "reward_invalid"]


def test_a_reward_gets_the_turns_of_a_row_that_says_none(folder: Path) -> None:
    (folder / "speaking.py").write_text(
        "def turns(prompt, completion, rollout): return len(rollout['turns']) + len(rollout['turns'][0]['content'])\n"
    )
    turns = [{"role": "assistant", "content": "xy"}, {"role": "tool", "content": "z"}]
    rows = [{"prompt": "?", "completion": "xyz"}, {"prompt": "?", "completion": "xyz", "rollout": {"turns": turns}}]
    assert [scored.reward for scored in score({"speaking:turns": 1.0}, rows)] == [4.0, 4.0]


def test_the_parts_of_a_functions_reward_have_names_that_a_person_can_read() -> None:
    names = {"a": 1.0, "pass@1 é": 1.0, 7: 1.0, "x\x1b[2J\ud800\n": 1.0}
    assert list(score_of("my:f", names, 1.0).parts) == ["f_a", "f_pass@1 é", "f_7", r"f_x\x1b[2J\ud800\n"]
    fault = scored("my:f", 1.0, lambda: {"x" * 201: 1.0})
    assert fault.reason == "reward_invalid" and "has more than 200 characters" in fault.message


def test_rows_are_scored_outside_of_a_run() -> None:
    rows = [
        {"prompt": "2 + 2?", "answer": "4", "completion": text} for text in ("<answer>4</answer>", "<answer>5</answer>")
    ]
    rows.append({"prompt": [{"role": "user", "content": "x"}], "completion": "y", "rollout": {"num_tokens": 7}})
    assert [scored.reward for scored in score({"exact": 1.0}, rows[:2])] == [1.0, 0.0]
    assert [scored.reward for scored in score({"length": 1.0}, rows, {"length": {"max": 3}})] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("killed", ["worker", "keeper"])
def test_what_a_worker_started_ends_with_it_also_when_that_alone_is_killed(folder: Path, killed: str) -> None:
    (folder / "leaving.py").write_text(
        "import os, subprocess\n"
        "def reward(prompt, completion):\n"
        "    left = subprocess.Popen(['sleep', '600'], start_new_session=True, stdin=subprocess.DEVNULL)\n"
        "    return {'worker': float(os.getpid()), 'left': float(left.pid)}\n"
    )
    with RewardPool({"leaving:reward": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
        (score,) = pool.score(items("x"))
        worker, left = (int(score.parts[f"reward_{name}"]) for name in ("worker", "left"))
        keeper = pool._scorers[0].processes.workers[0]._process.keeper  # pyright: ignore
        assert is_alive(left) and psutil.Process(worker).ppid() == keeper.pid
        os.kill(worker if killed == "worker" else keeper.pid, signal.SIGKILL)
        for pid in (left, worker):
            until_gone(pid)
        until(lambda: has_ended(keeper))
        assert pool.score(items("x"))[0].reward is not None, "a new one is asked"
