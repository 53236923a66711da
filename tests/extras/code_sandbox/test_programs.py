"""The reward `code`: which block of a completion is its program, and what a program may do that is
none of its tests' business."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlpipe.extras.code_sandbox.code import code, last_program
from tests.deadlines import DEADLINE_S

Reward = Callable[[dict[str, Any], str], float]
TWICE = {"inputs": ["1", "2", "3"], "outputs": ["2", "4", "6"]}


@pytest.fixture(scope="module")
def reward() -> Reward:
    return code(time_s=DEADLINE_S, total_s=DEADLINE_S)


def prompt(answer: Any) -> dict[str, Any]:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return {"prompt_id": "set/0", "messages": [], "answer": text, "metadata": {}}


def block(source: str) -> str:
    return f"```python\n{source}\n```"


def test_last_program() -> None:
    assert last_program("```py\na\n```\n```Python3\nb\n  c\n```\n```\nd\n```") == "b\n  c\n"
    assert last_program("```python\n" * 100_000) is None
    assert last_program("```python\n```") == "\n"


@pytest.mark.parametrize(
    "completion",
    ["1. So:\n   ```python\n   {}\n   ```\n2. Done", "- ```python\n  {}\n  ```", "\t```python\n\t{}\n\t```",
     "> 1. ```python\n>    {}\n>    ```",
     "```python\n{}\n`````", "~~~ Python\n{}\n~~~", "````python\n{}\n````", "```py\r\n{}\r\n```",
     "> ```text\n```python\n{}\n```",
     "``` one`\n```python\n{}\n```", "1. x\n   ```python\n{}\n```",
     "```python\nwrong\n```\n~~~py\n{}\n~~~\n```python\nnot closed\n~~~",
     *(f"```{info}\n{{}}\n```" for info in ('python title="x"', "{.python}", "{ .python .numberLines }", "{python}",
                                            "python3.11", "PY3", "python:a.py", "python{1,3}"))],
)  # fmt: skip
def test_a_fence_is_one_of_commonmark(completion: str) -> None:
    assert last_program(completion.replace("{}", "n = 1")) == "n = 1\n"


@pytest.mark.parametrize(
    "completion",
    ["````python\nn\n```", "```python\nn\n~~~", "> ```python\nn\n```", "```python x`\nn\n```",
     "``python\nn\n``", "```python\nn\n    ```",
     "```python\nn\n``` end",
     *(f"```{info}\nn\n```" for info in ("pycon", "pythonic", "python2", "python-repl", "{r}", "", "text python"))],
)  # fmt: skip
def test_no_program(completion: str) -> None:
    assert last_program(completion) is None


def test_what_is_inside_a_block_stays() -> None:
    source = 's = """\n```\n  ~~~\n"""\nif s:\n    pass\n'
    assert last_program(f"````python\n{source}````") == source
    assert last_program("- a\n\n      ```py\n      if 1:\n          2\n\n     3\n      ```") == "if 1:\n    2\n\n3\n"
    assert last_program("\t```py\n\tif 1:\n\t\t2\n\t```") == "if 1:\n\t2\n"


HOSTILE = {"quotes": ">" * 100_000 + "```\n", "lists": "- " * 100_000 + "```py\n", "blank": " " * 100_000 + "```py\n",
           "backticks": "`" * 100_000 + "\n", "digits": "1" * 100_000 + "\n",
           "numbers": "1. " * 100_000 + "\n"}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_read_in_one_pass(name: str) -> None:
    assert last_program(HOSTILE[name] * 20) is None


ENDINGS = [
    "exit()",
    "quit()",
    "exit(0)",
    "import sys; sys.exit(0)",
    "raise SystemExit",
    "def main():\n    quit()\nmain()",
    "help, license, copyright, credits",
]
STACKS = ["(-1, -1)", "(2**28, 2**28)", "[2**29, -1]", "(resource.getrlimit(resource.RLIMIT_STACK)[1],) * 2"]
DEEP = (
    "sys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\ndef f(n): return n and 1 + f(n - 1)\n"
    "assert f(20_000) == 20_000"
)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_right_program_may_end_as_it_likes(ending: str, reward: Reward) -> None:
    assert reward(prompt(TWICE), block(f"print(2 * int(input()))\n{ending}")) == 1.0


@pytest.mark.parametrize("ending", ["exit(1)", "quit('wrong')"])
def test_a_program_that_says_it_failed_has(ending: str, reward: Reward) -> None:
    assert reward(prompt(TWICE), block(f"print(2 * int(input()))\n{ending}")) == 0.0


@pytest.mark.parametrize("stack", STACKS)
def test_a_program_may_raise_its_stack(stack: str, reward: Reward) -> None:
    source = (
        f"import resource, sys, threading\nresource.setrlimit(resource.RLIMIT_STACK, {stack})\n{DEEP}\n"
        "print(2 * int(input()))"
    )
    assert reward(prompt(TWICE), block(source)) == 1.0


def test_a_program_may_have_a_name_that_site_adds(reward: Reward) -> None:
    assert (
        reward(prompt("assert help(2) == license(2) == 4"), block("def help(x): return 2 * x\nlicense = help")) == 1.0
    )


@pytest.mark.parametrize(
    ("result", "expected", "passes"),
    [(0.0, 5e-7, 0.0), (5e-7, 0.0, 0.0), (1e-17, 0.0, 1.0), (6.62607e-34, 6.62607e-34, 1.0), (9e-31, 6e-34, 0.0)],
)
def test_results_are_compared_relatively(result: float, expected: float, passes: float, reward: Reward) -> None:
    given = prompt({"inputs": [[1]], "outputs": [[expected]], "fn_name": "f"})
    assert reward(given, block(f"def f(x): return [{result!r}]")) == passes
