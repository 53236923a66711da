"""The reward `code`: tests written in Python all run, those that test nothing are refused, and a
right program always passes."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from rlpipe.base.errors import UserError
from rlpipe.extras.code_sandbox.code import code
from rlpipe.rewards.pool import check_rewards
from tests.deadlines import DEADLINE_S
from tests.extras.code_sandbox.test_code import block, prompt

Reward = Callable[[Any, str], float]
CASE = "import unittest\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n"
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"
NEVER_CALLED = "def test_f():\n    assert f(1) == 2\n"
RIGHT, WRONG = "def f(x):\n    return x + 1", "def f(x):\n    return 0"


@pytest.fixture(scope="module")
def reward() -> Reward:
    return code(time_s=DEADLINE_S, total_s=DEADLINE_S)


def asked(text: str, **metadata: Any) -> dict[str, Any]:
    return prompt(**metadata) | {"messages": [{"role": "user", "content": text}]}


RUN = {
    "a function that nobody calls": prompt(NEVER_CALLED),
    "a TestCase without a runner": prompt(CASE),
    "a TestCase of a TestCase": prompt(CASE.replace("TestF(unittest.TestCase)", "Base(unittest.TestCase)")
                                       + "class Other(Base):\n    pass\n"),
    "a TestCase run by nobody who listens": prompt(
        f"{CASE}unittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(TestF))"),
    "a TestCase with unittest.main": prompt(f"{CASE}if __name__ == '__main__':\n    unittest.main()"),
    "a class of pytest's": prompt("class TestF:\n    def setup_method(self):\n        self.x = 1\n"
                                  "    def test_f(self):\n        assert f(self.x) == 2"),
    "check, and the row names the function": prompt(CHECK, fn_name="f"),
    "check, and the prompt begins the function": asked("Write it.\n\ndef f(x):\n    '''One more.'''\n", test=CHECK),
    "under __main__": prompt("if __name__ == '__main__':\n    assert f(1) == 2"),
    "called under __main__": prompt(f"{NEVER_CALLED}if '__main__' == __name__:\n    test_f()"),
    "KodCode": prompt("an answer", test=f"from solution import f\n\n{NEVER_CALLED}"),
    "the module": prompt("import solution\nassert solution.f(1) == 2"),
    "all of the module": prompt("from solution import *\nassert f(1) == 2"),
    "lines that belong together": prompt(["x = 1", "y = 2", "assert f(x) == y"]),
    "a failing exit": prompt("import sys\nif f(1) != 2:\n    sys.exit(1)"),
    "numpy's asserts": prompt("import numpy\nnumpy.testing.assert_allclose(f(1), 2)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_every_assertion_runs(name: str, reward: Reward) -> None:
    if "numpy" in name:
        reward = code(time_s=DEADLINE_S, total_s=DEADLINE_S, memory_mb=4096, processes=64)
    assert (reward(RUN[name], block(RIGHT)), reward(RUN[name], block(WRONG))) == (1.0, 0.0)


NOTHING = {
    "only comments": prompt("# tests\n# more"),
    "a text": prompt("hello"),
    "check without a name": prompt(CHECK),
    "check, and two functions in the prompt": asked("def f(x): ...\ndef g(x): ...", test=CHECK),
    "what is always true": prompt("assert (f(1) == 2, 'wrong')\nassert True"),
    "a failure that is swallowed": prompt("try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('failed')"),
    "a call swallowed": prompt(f"{NEVER_CALLED}try:\n    test_f()\n"
                               "except Exception as error:\n    print(error)".replace("test_f", "run")),
    "prints": prompt("print(f(1) == 2)"),
    "nothing of the program": prompt("def f(x):\n    return x + 1\nassert f(1) == 2"),
    "a case without tests": prompt("import unittest\nclass A(unittest.TestCase):\n    def helper(self):\n"
                                   "        self.assertEqual(f(1), 2)"),
    "pytest's parameters": prompt("def test_f(capsys):\n    assert f(1) == 2"),
    "async": prompt("async def test_f():\n    assert f(1) == 2"),
    "a relative import": prompt("from .solution import f\nassert f(1) == 2"),
    "a functional test without a name": prompt([{"input": "1", "output": "2", "testtype": "functional"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_tests_that_test_nothing_are_refused_before_any_program_runs(name: str, reward: Reward) -> None:
    with pytest.raises(ValueError, match="prompt set/0"):
        reward(NOTHING[name], "no program")


def test_preflight_says_that_tests_test_nothing() -> None:
    mine: Any = prompt("print(f(1))")
    with pytest.raises(UserError, match="no assertion of its tests can run"):
        check_rewards({"code": 1.0}, {"code": {"time_s": 5.0}}, 60.0, {"data.mine": [mine]})


FAULTS = {
    "the tests' packages": ("import no_such_package\nassert f(1) == 2", RIGHT),
    "the program as something else": ("from main import f\nassert f(1) == 2", RIGHT),
    "a Decimal": ("assert f(1) == 2", "import decimal\ndef f(x): return decimal.Decimal(x + 1)"),
    "a date": ("import datetime\nassert f(1) == datetime.date(2020, 1, 1)",
               "import datetime\ndef f(x): return datetime.date(2020, 1, 1)"),
    "a deep result": ("assert f(1)", "def f(x):\n    for _ in range(5000): x = [x]\n    return x"),
    "an iterator without end": ("assert next(f(1)) == 1", "import itertools\ndef f(x): return itertools.count(x)"),
    "a fault that a test case swallows": (CASE, "import decimal\ndef f(x): return decimal.Decimal(x + 1)"),
    "a class derived from the program's": ("class B(f):\n    pass\nassert B().x == 2", "class f:\n    x = 2"),
    "an operator with a plain value": ("assert f(1) * 2 == 4",
                                       "class f:\n    def __init__(self, x): pass\n    def __mul__(self, x): return 4"),
    "only skipped tests": (CASE.replace("    def", "    @unittest.skip('later')\n    def"), RIGHT),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_told_is_a_fault_and_no_zero(name: str, reward: Reward) -> None:
    tests, source = FAULTS[name]
    with pytest.raises(ValueError, match="prompt set/0"):
        reward(prompt(tests), block(source))


def test_a_decimal_in_the_function_form_is_a_fault_and_no_zero(reward: Reward) -> None:
    given = prompt({"inputs": [[1]], "outputs": [[0.5]], "fn_name": "f"})
    with pytest.raises(ValueError, match="only plain values are compared"):
        reward(given, block("import decimal\ndef f(x): return [decimal.Decimal('0.5')]"))
    assert (
        reward(given, block("class Same:\n    def __eq__(self, other): return True\ndef f(x): return [Same()]")) == 0.0
    )
    assert reward(given, block("class Other: pass\ndef f(x): return Other()")) == 0.0


YES = """
class Yes:
    def yes(self, *_): return self
    __sub__ = __rsub__ = __abs__ = yes
    __lt__ = __gt__ = __eq__ = __contains__ = lambda *_: True
def f(x): return Yes()
"""


@pytest.mark.parametrize(
    "tests",
    [
        "abs(f(2) - 4.0) < 1e-6",
        "abs(4.0 - f(2)) < 1e-6",
        "f(2) > 3",
        "3 < f(2)",
        "3 in f(2)",
        "f(2) == 3",
        "f(2) in [3]",
    ],
)
def test_an_object_that_says_yes_to_all_passes_nothing(tests: str, reward: Reward) -> None:
    score = 0.0
    with suppress(ValueError):  # a fault pays nothing either
        score = reward(prompt(f"assert {tests}"), block(YES))
    assert score == 0.0


OBJECTS = """
import unittest
from solution import Box, Full
class TestBox(unittest.TestCase):
    def setUp(self):
        self.box = Box([1, 2])
    def test_box(self):
        self.assertIsInstance(self.box, Box)
        self.assertEqual((len(self.box), self.box[1], list(self.box), str(self.box)), (2, 2, [1, 2], "Box"))
        self.assertTrue(self.box <= Box([9]))
        self.assertEqual(self.box + Box([3]), Box([1, 2, 3]))
        self.assertIs(self.box.me(), self.box)
        self.assertNotEqual(self.box, [1, 2])
        self.box.limit = 2
        with self.assertRaises(Full):
            self.box.put(3)
        steps = self.box.steps()
        self.assertEqual((next(steps), next(steps)), (1, 2))
"""
BOX = """
import dataclasses
class Full(ValueError):
    pass
@dataclasses.dataclass
class Box:
    values: list
    limit = 99
    def __len__(self): return len(self.values)
    def __getitem__(self, at): return self.values[at]
    def __le__(self, other): return self.values <= other.values
    def __str__(self): return "Box"
    def __add__(self, other): return Box(self.values + other.values)
    def me(self): return self
    def steps(self): yield from self.values
    def put(self, value):
        if len(self.values) >= self.limit: raise Full("full")
        self.values.append(value)
"""


def test_objects_of_the_program_do_what_they_do_at_home(reward: Reward) -> None:
    assert reward(prompt(OBJECTS), block(BOX)) == 1.0
    for right, wrong in [("return len(", "return 1 + len("), ("Full(ValueError)", "Full(Exception)"),
                         ('raise Full("full")', "pass"), ("self.values + other", "other")]:  # fmt: skip
        expected = float(right == "Full(ValueError)")
        assert reward(prompt(OBJECTS), block(BOX.replace(right, wrong))) == expected, wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "output", "returns", "passes"),
    [
        # as APPS and TACO write them
        ([1], "101", "'101'", True), ([1], "101", "101", False), ([1], ["101"], "'101'", True),
        # as PRIME and LiveCodeBench
        ("1", "101", "101", True), ("1", "101", "'101'", False), ("1", '"101"', "'101'", True),
        ("1", "plain", "'plain'", True),
        ([1], 0.3, "0.1 + 0.2", True), ([1], [[0.3, 1], 2], "[(0.1 + 0.2, 1), 2]", True),
        ([1], {"a": 0.3}, "{'a': 0.1 + 0.2}", True),
        ([1], 0.3, "0.301", False), ([1], 3, "3.0000000001", False),
        ([1], [0.3], "0.1 + 0.2", True), ([1], 2.0, "2", True),
        ([1], 1.5, "10**400", False), ([1], 0.5, "float('nan')", False), ("1", "0.3", "0.1 + 0.2", True),
        ([{"1": 2}], 2, "x.get(1)", True), ('{"1": 2}', "2", "x.get('1')", True), ([{"a": 2}], 2, "x['a']", True),
    ],
)  # fmt: skip
def test_a_function_is_judged_as_the_data_set_judges_it(
    given: Any, output: Any, returns: str, passes: bool, reward: Reward
) -> None:
    tests = prompt({"inputs": [given], "outputs": [output], "fn_name": "f"})
    assert reward(tests, block(f"def f(x): return {returns}")) == float(passes)
    listed = prompt([{"input": given, "output": output}], func_name="f")
    assert reward(listed, block(f"def f(x): return {returns}")) == float(passes)
