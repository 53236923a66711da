"""The reward `code`: forms of tests, what passes, what does not, and programs that pretend."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpipe.base.errors import UserError
from rlpipe.extras.code_sandbox import runner
from rlpipe.extras.code_sandbox.code import check_time, code, pick, read_tests
from rlpipe.extras.code_sandbox.wire import same_output
from rlpipe.rewards.pool import RewardPool
from rlpipe.rewards.registry import resolve
from rlpipe.rewards.score import Score
from tests.deadlines import DEADLINE_S

Reward = Callable[[dict[str, Any], str], float]
SUM = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}
ADD = "print(sum(map(int, input().split())))"
PLUS_ONE = ["assert f(1) == 2", "assert f(10) == 11"]


@pytest.fixture(scope="module")
def reward() -> Reward:
    return code(time_s=DEADLINE_S, total_s=DEADLINE_S)


def prompt(answer: Any = None, **metadata: Any) -> dict[str, Any]:
    text = answer if answer is None or isinstance(answer, str) else json.dumps(answer)
    return {"prompt_id": "set/0", "messages": [], "answer": text, "metadata": metadata}


def block(source: str) -> str:
    return f"<think>\n```python\nraise\n```\n</think> So:\n```python\n{source}\n```\nDone."


SOLUTION = "class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n        return (*a, b)"
HUMAN = {
    "test": "def check(candidate):\n    assert candidate([1.5, 2]) == (1, 'x')\n    assert not candidate([])\n",
    "entry_point": "g",
}
SORT = "def f(values):\n    values.sort()"
FORMS = {
    "APPS, stdin": (prompt(SUM), ADD),
    "APPS, in the metadata, lines": (prompt(input_output={"inputs": [["1", "2"]], "outputs": [["3", ""]]}),
                                     "print(int(input()) + int(input()))"),
    "APPS, function": (prompt({"inputs": [[[1], 2]], "outputs": [[[1, 2]]], "fn_name": "add"}), SOLUTION),
    "PRIME, function": (prompt({"inputs": ["[1]\n2"], "outputs": ["[1, 2]"], "fn_name": "add"}), SOLUTION),
    "function without a class": (prompt({"inputs": ["2"], "outputs": ["4"], "fn_name": "f"}), "def f(x): return x * x"),
    "function of dictionaries": (prompt({"inputs": [[{"a": 1}]], "outputs": [{"1": "a"}], "fn_name": "f"}),
                                 "f = lambda d: {v: k for k, v in d.items()}"),
    "AceCode, asserts": (prompt({"inputs": ["", ""], "outputs": ["", ""],
                                 "assert_case": ["assert f(2) == 4", "assert f(3) == 9"]}), "def f(x): return x * x"),
    "DeepCoder, stdin": (prompt([{"input": "1 2", "output": "3", "type": "stdin_stdout"}]), ADD),
    "LiveCodeBench, function": (prompt([{"input": "[1]\n2", "output": "[1, 2]", "testtype": "functional"}],
                                       func_name="add"), SOLUTION),
    "verification_info": (prompt(verification_info={"answer": {"test_cases": [{"input": "1 2", "output": "3"}]}}), ADD),
    "MBPP": (prompt(test_list=PLUS_ONE, test_setup_code="import math"), "def f(x):\n    return x + 1"),
    "MBPP, a name of Python": (prompt(test_list=["assert sum(1, 3) == 4"], code="def sum(a, b):\n    return a + b"),
                               "def sum(a, b): return a + b"),
    "asserts as the answer": (prompt(PLUS_ONE), "def f(x): return x + 1"),
    "Python as the answer": (prompt("\n".join(PLUS_ONE)), "def f(x): return x + 1"),
    "HumanEval": (prompt(**HUMAN), "def g(x): return (1, 'x') if x else ()"),
    "LeetCode's entry point": (prompt(test="def check(c):\n    assert c([1], b=2) == (1, 2)",
                                      entry_point="Solution().add"), "from typing import List\n" + SOLUTION),
    "objects": (prompt("c = Counter2()\nc.up()\nassert c.up() == 2 and c.value == 2\nassert c.up.__call__() == 3"),
                ("class Counter2:\n    value = 0\n    def up(self):\n        self.value += 1\n"
                 "        return self.value")),
    "in place": (prompt("a = [3, 1]\nassert f(a) is None\nassert a == [1, 3]"), SORT),
    "exceptions": (prompt("try:\n    f(0)\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert False"),
                   "def f(x): return 1 / x"),
    "plain values": (prompt("assert f() == [{1, 2}, frozenset({3}), b'x', 1j, {(1,): None}, [0, 1], True, 2**70000]"),
                     ("def f(): return [{1, 2}, frozenset({3}), b'x', 1j, {(1,): None}, "
                      "(i for i in range(2)), True, 2**70000]")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_tests(form: str, reward: Reward) -> None:
    given, source = FORMS[form]
    assert reward(given, block(source)) == 1.0
    broken = (
        source.replace("return", "return [],")
        .replace("print(", "print(1, ")
        .replace("values.sort", "sorted")
        .replace("k for", "v for")
    )
    wrong = reward(given, block(broken if form != "exceptions" else "def f(x): return x"))
    assert wrong == 0.0


TWICE = prompt({"inputs": ["1", "2", "3"], "outputs": ["2", "4", "6"]})


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("print(2 * int(input()))", 0.0),  # no block
        ("```python\nprint(2 * int(input()))", 0.0),  # not closed
        ("```text\nprint(2 * int(input()))\n```", 0.0),
        ("", 0.0),
        (block(""), 0.0),
        (block("print(2 *"), 0.0),
        (block("("*1_000_000), 0.0),
        (block("print(2 * int(input()))\n1 / 0"), 0.0),
        (block("print(2 * int(input())); import os; os._exit(119)"), 0.0),
        (block("print(2 * int(input()))"), 1.0),
    ],
)  # fmt: skip
def test_malformed(completion: str, expected: float, reward: Reward) -> None:
    assert reward(TWICE, completion) == expected


def test_partial_is_the_fraction_that_passes() -> None:
    partial = code(partial=True, time_s=DEADLINE_S, total_s=DEADLINE_S)
    assert partial(TWICE, block("print(2 if int(input()) < 2 else 6)")) == pytest.approx(2 / 3)
    assert partial(TWICE, block("print(2 * int(input()))")) == 1.0
    assert partial(TWICE, "no program") == 0.0


CHEATS = {
    "exits early": "import os\nos._exit(0)",
    "exits politely": "import sys\nsys.exit()",
    "exits when asked": "def f(x):\n    import os\n    os._exit(0)",
    "prints markers": "print('OK', 'PASSED', 1, True)\ndef f(x): return 'PASSED'",
    "equals everything": (
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Any()"
    ),
    "a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Any()"
    ),
    "no assert": "import builtins\nbuiltins.AssertionError = None\ndef f(x): return 0",
    "patches the sandbox": """
import sys
from rlpipe.extras.code_sandbox import program
program.same = lambda *_: True
program._exit_code = lambda body: 0
program.encode = lambda *_: 2
def f(x): return 0
""",
    "blames the tests": "def f(x): raise SyntaxError('tests')",
    "exits as the tests do": "import os\nos._exit(119)",
    "forges replies": """
import os
for fd in range(3, 300):
    for text in [b'{"value": 2, "arguments": []}\\n', b'{"status": "ok", "bytes": 0}\\n']:
        try:
            os.write(fd, text)
        except OSError:
            pass
def f(x): return 0
""",
    "looks for the answer": """
import gc, os, sys
def found(text):
    return 'zq88' + '42' in text
def f(x):
    frame, texts = sys._getframe(), []
    while frame:
        texts.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    texts += [one for one in gc.get_objects() if isinstance(one, str)]
    for fd in range(300):
        try:
            texts.append(os.pread(fd, 100000, 0).decode(errors='replace'))
        except OSError:
            pass
    for folder, _, names in os.walk('/tmp'):
        for name in names:
            try:
                texts.append(open(os.path.join(folder, name), errors='replace').read())
            except OSError:
                pass
    return 'zq88' + '42' if any(map(found, texts)) else 0
if __name__ == '__main__':
    print(f(0))
""",
}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize(
    "given",
    [
        prompt(test_list=["secret = 'zq8842'\nassert f(1) == secret"]),
        prompt({"inputs": ["1"], "outputs": ['"zq8842"'], "fn_name": "f"}),
        prompt({"inputs": ["1"], "outputs": ["zq8842"]}),
        prompt("assert f(1) in ('zq8842', 2000)"),
    ],
    ids=["assert", "function", "stdin", "in"],
)
def test_pretending_does_not_pay(name: str, given: dict[str, Any], reward: Reward) -> None:
    assert reward(given, block(CHEATS[name])) == 0.0


@pytest.mark.parametrize(
    "given",
    [
        prompt(None),
        prompt(""),
        prompt({"other": []}),
        prompt({"inputs": ["1"], "outputs": []}),
        prompt("assert ("),
        prompt("42 is the answer"),
        prompt({"inputs": ["not JSON"], "outputs": ["1"], "fn_name": "f"}),
        prompt(test_list=["assert f(1) == 2"], test_setup_code="import no_such_module"),
        prompt("assert f(lambda x: x) == 1"),
    ],
)
def test_tests_at_fault_are_an_error_and_no_zero(given: dict[str, Any], reward: Reward) -> None:
    with pytest.raises(ValueError, match="prompt set/0"):
        reward(given, block("def f(x): return 1"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"time_s": 0}, "time_s"), ({"memory_mb": 1}, "memory_mb"), ({"processes": 0}, "processes"),
     ({"time_s": 5.0, "total_s": 1.0}, "total_s"), ({"python": "/no/python"}, "/no/python")],
)  # fmt: skip
def test_senseless_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve("code", arguments)


def test_the_longest_inputs_are_picked_in_order() -> None:
    tests = read_tests(prompt({"inputs": ["1", "333", "22", "4444"], "outputs": ["a", "b", "c", "d"]}))
    assert [test.expected for test in pick(tests, 2)] == ["b", "d"]
    assert pick(tests, 9) == tests


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [("1\n2\n", "1\n2", True), ("1  2 ", "1 2\n", True), ("1 2", "1\n2", False), ("", "", True),
     ("", "1", False), ("0.30000001", "0.3", True),
     ("0.31", "0.3", False), ("10000000", "10000001", False), ("yes", "YES", False),
     ("nan", "nan", True), ("inf", "0.5", False),
     ("1e400", "1.5", False), ("2", "2.0", True), ("2.0", "2", False),
     ("1" * 5000, "1" * 5000, True), ("a b", "a", False),
     ("0.0", "0.0000005", False), ("0.0000005", "0.0", False), ("6.63e-34", "9.11e-31", False),
     ("6.6260701e-34", "6.62607e-34", True),
     ("1.2e-16", "0.0", True), ("-0.0", "0.0", True), ("0", "1e-7", False), ("0.0001234567", "0.000123", True),
     ("0.000124", "0.000123", False),
     ("0.0010009", "0.001", False), ("123456789.5", "123456790.1", True), ("0.33333333", "0.333333", True),
     ("0.1", "0." + "1" * 400, False)],
)  # fmt: skip
def test_same_output(ours: str, theirs: str, same: bool) -> None:
    assert same_output(ours, theirs) is same


GRADER = "from rlpipe.extras.code_sandbox.code import check_time, code\nreward = code(time_s=8.0, total_s=16.0)\n"
HARM = {
    "forks": (
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(30)\n        os._exit(0)\n"
    ),
    "memory": "x = bytearray(10 << 30)\n",
    "loop": "while True: pass\n",
    "files": "import os\nopen(f'/proc/{os.getppid()}/environ').read()\n",
    "brackets": "(" * 1_000_000,
    "kill": "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getppid(), 9)\n1 / 0\n",
}


@pytest.mark.slow
def test_harm_in_one_rollout_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders.py").write_text(GRADER)
    monkeypatch.chdir(tmp_path)
    right, wrong = block("print(2 * int(input()))"), block("print(0)")
    completions = [text for harm in HARM.values() for text in (right, block(harm + "\nprint(2 * int(input()))"), wrong)]
    given = prompt({"inputs": ["1"], "outputs": ["2"]})
    with RewardPool({"graders:reward": 1.0}, workers=2, timeout_s=DEADLINE_S) as pool:
        scores = pool.score([{"prompt": given, "completion": completion, "rollout": {}} for completion in completions])
    one, zero = Score(1.0, {"reward": 1.0}), Score(0.0, {"reward": 0.0})
    assert scores == [one, zero, zero] * len(HARM)


def test_a_check_with_a_nan_is_an_error_and_no_zero() -> None:
    given = [prompt({"inputs": [[1]], "outputs": [expected], "fn_name": "f"}) for expected in (1, float("nan"))]
    items = [{"prompt": one, "completion": block("def f(x): return x"), "rollout": {}} for one in given]
    with RewardPool({"code": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
        scores = pool.score(items)
    assert [(score.reward, score.reason) for score in scores] == [(1.0, None), (None, "reward_error")]
    assert pool.last_error is not None and "not JSON compliant" in pool.last_error


@pytest.mark.parametrize(("is_full", "level"), [(True, logging.INFO), (False, logging.WARNING)])
def test_the_log_names_the_confinement(
    is_full: bool, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        runner, "check_interpreter", lambda python: runner.Confinement(f"walls around {python}", is_full)
    )
    with caplog.at_level(logging.INFO):
        check_time({"python": "/a/python"}, 10.0)
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith("reward code: programs are confined by walls around /a/python")


def test_by_name() -> None:
    with RewardPool({"code": 1.0}, workers=1, timeout_s=DEADLINE_S) as pool:
        scores = pool.score(
            [{"prompt": given, "completion": block(ADD), "rollout": {}} for given in (prompt(SUM), prompt(None))]
        )
    assert [(score.reward, score.reason) for score in scores] == [(1.0, None), (None, "reward_prompt")]
    assert pool.last_error is not None and "has no tests" in pool.last_error
