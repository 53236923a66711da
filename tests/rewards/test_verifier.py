"""The reward `reasoning_gym` where a data set's verifier evaluates the answer: nothing of a
completion's is ever run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from rlpipe.config.sections import DataConfig
from rlpipe.data.sources import load_prompts
from rlpipe.rewards.verifier import EVALUATED, score_answer

HOSTILE = [
    "__import__('os').system('touch {mark}')",
    '[__import__("pathlib").Path("{mark}").touch()]',
    "open('{mark}', 'w')",
    "(lambda: open('{mark}', 'w'))()",
    "().__class__.__base__.__subclasses__()",
    'S(\'open("{mark}", "w")\')',
    "x.__class__.__init__.__globals__",
    'f\'{{open("{mark}", "w")}}\'',
]
# found by hand: evaluates what the data set made, never the answer
HARMLESS = {
    "code/codeio.py": "a program of the data set",
    "code/bf.py": "compiles a program of its own to Brainfuck",
    "code/contrib/bfit/BF-it.py": "the same compiler",
    "code/contrib/bfit/Compiler/Compiler.py": "the same compiler",
    "algorithmic/number_sorting.py": "its own answer",
    "arithmetic/bitwise_arithmetic.py": "its own problem",
    "arithmetic/basic_arithmetic.py": "its own problem",
    "arithmetic/gsm_symbolic/generators_00_49.py": "its own fractions",
    "arithmetic/gsm_symbolic/generators_50_99.py": "its own fractions",
    "logic/propositional_logic.py": "a parser of its own",
}


def prompts(name: str, count: int) -> list[dict]:
    data = DataConfig.model_validate(
        {"name": "made", "use": "rl", "source": f"reasoning_gym:{name}", "rows_max": count}
    )
    return [made.as_json() for made in load_prompts(data, seed=5)]


@pytest.mark.parametrize("name", EVALUATED)
@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_is_scored_as_none(name: str, answer: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    prompt = prompts(name, 1)[0]
    none = score_answer(prompt, "I give up")
    assert score_answer(prompt, f"<answer>{answer.format(mark=mark)}</answer>") == none <= 0.01
    assert not mark.exists()


def test_the_hostile_answers_would_run(tmp_path: Path) -> None:
    """Without the grammar: the verifier itself runs what it is given."""
    mark = tmp_path / "mark"
    dataset = reasoning_gym.create_dataset("countdown", size=1, seed=5)
    dataset.score_answer(HOSTILE[0].format(mark=mark), dataset[0])
    assert mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVALUATED)
def test_an_answer_within_the_grammar_reaches_the_verifier(name: str) -> None:
    dataset = reasoning_gym.create_dataset(name, size=40, seed=5)
    for prompt in prompts(name, 40):
        entry = prompt["metadata"]["reasoning_gym"]["entry"]
        entry = ast.literal_eval(entry) if isinstance(entry, str) else entry
        if "Integral" in entry["answer"]:  # an integral that sympy leaves undone is no answer
            assert score_answer(prompt, f"<answer>{entry['answer']}</answer>") == 0
            continue
        for answer in (entry["answer"], entry["answer"] + " 1", entry["answer"][:-1]):
            assert score_answer(prompt, f"<answer>{answer}</answer>") == dataset.score_answer(answer.strip(), entry)


@pytest.mark.parametrize(
    ("name", "answer", "admitted"),
    [
        ("countdown", "(1 + 2.5) * 3 - 4 / .5", True),
        ("countdown", "9**9**9", False),
        ("puzzle24", "1 + x", False),
        ("simple_integration", "x**2/2 + exp(-2*x)*sin(x) + C", True),
        ("simple_integration", "Integral(x, x)", False),
        ("simple_integration", "x.n", False),
        ("simple_integration", "sqrt (x).n", False),
        ("simple_integration", "exec(x)", False),
        ("simple_integration", "x_y", False),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", True),
        ("n_queens", "print('_')", False),
    ],
)
def test_grammars(name: str, answer: str, admitted: bool) -> None:
    assert bool(EVALUATED[name].fullmatch(answer)) == admitted


def test_every_verifier_that_evaluates_is_known() -> None:
    """A new version of the library may bring another: read it, then add
    it to EVALUATED or to HARMLESS."""
    root = Path(reasoning_gym.__file__).parent
    calls = {"eval", "exec", "compile", "parse_expr", "sympify", "lambdify", "parse_latex", "__import__", "loads"}
    safe = {("json", "loads")}
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            of = (
                function.value.id
                if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
                else None
            )
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
            if name in calls and of != "re" and (of, name) not in safe:
                found.add(path.relative_to(root).as_posix())
    modules = {
        DATASETS[name][0].__module__.removeprefix("reasoning_gym.").replace(".", "/") + ".py" for name in EVALUATED
    }
    assert found == modules | set(HARMLESS)
