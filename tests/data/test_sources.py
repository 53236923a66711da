"""Data sets: what is loaded, how it is split, and how bad rows are named."""

import io
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.base.errors import UserError
from rlpipe.base.hashing import canonical_json
from rlpipe.base.values import plain_json
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.sections import DataConfig
from rlpipe.data.sources import in_part, load_conversations, load_prompts, split_point
from rlpipe.records.prompt import Prompt
from rlpipe.store.backend import open_store
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT
from tests.s3_world import S3Server

WORDS = {"min_word_len": 3, "max_word_len": 10}


def config(source: object, use: str = "rl", **fields: object) -> DataConfig:
    return DataConfig.model_validate({"name": "mine", "use": use, "source": str(source), **fields})


def jsonl(folder: Path, rows: Sequence[object]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(**fields: object) -> DataConfig:
    return config("reasoning_gym:spell_backward", **{"rows_max": 300, "args": WORDS, **fields})


def test_a_data_set_on_s3_is_read(s3_server: S3Server) -> None:
    store, file = open_store(s3_server.url()), io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["2+2?", "3+3?"], "answer": [4, 6]}), file)
    store.put("rows.parquet", file.getvalue())
    prompts = load_prompts(config("datasets:parquet", args={"data_files": store.address("rows.parquet")}), seed=0)
    assert [(prompt.messages[-1]["content"], prompt.answer) for prompt in prompts] == [("2+2?", "4"), ("3+3?", "6")]


def test_jsonl_prompts_carry_answer_and_other_columns(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        [{"prompt": "2+2?", "answer": 4, "level": 1}, {"prompt": [{"role": "user", "content": "3+3?"}], "answer": "6"}],
    )
    first, second = load_prompts(config(path), seed=0)
    assert first == Prompt("mine/0", "mine", [{"role": "user", "content": "2+2?"}], "4", {"level": 1})
    assert (second.messages, second.answer) == ([{"role": "user", "content": "3+3?"}], "6")
    assert Prompt(**json.loads(canonical_json(first.as_json()))) == first


def test_parquet_datasets_and_jsonl_agree(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": f"q{index}", "solution": str(index)} for index in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "splits"))
    folder = tmp_path / "plain"
    folder.mkdir()
    fields = {"prompt_field": "question", "answer_field": "solution", "rows_max": 4}
    expected = load_prompts(config(jsonl(folder, rows), **fields), seed=0)
    assert len(expected) == 4
    for source in (
        tmp_path / "rows.parquet",
        f"datasets:{tmp_path / 'saved'}",
        f"datasets:{tmp_path / 'splits'}",
        f"datasets:{folder}",
    ):
        assert load_prompts(config(source, **fields), seed=0) == expected, source


def test_generator_is_deterministic_and_json() -> None:
    prompts = load_prompts(words(rows_max=20), seed=7)
    assert [prompt.prompt_id for prompt in prompts[:2]] == ["mine/0", "mine/1"]
    assert prompts == load_prompts(words(rows_max=20), seed=7)
    assert prompts != load_prompts(words(rows_max=20), seed=8)
    assert all(prompt.answer and prompt.messages[-1]["content"].endswith(prompt.answer[::-1]) for prompt in prompts)
    assert [Prompt(**json.loads(canonical_json(prompt.as_json()))) for prompt in prompts] == prompts


def test_held_out_prompts_are_in_no_other_part_whatever_is_drawn() -> None:
    def texts(part: str, use: str, **fields: object) -> set[str]:
        return {prompt.messages[-1]["content"] for prompt in load_prompts(words(part=part, use=use, **fields), seed=1)}

    held_out = texts("heldout", "evaluation", heldout_fraction=0.3)
    assert held_out
    assert held_out.isdisjoint(texts("train", "rl", heldout_fraction=0.3))
    assert held_out.isdisjoint(texts("train", "sft", heldout_fraction=0.3, rows_max=900, system_prompt="Be brief."))
    assert held_out | texts("train", "rl", heldout_fraction=0.3) == texts("all", "rl")
    spoken = load_conversations(words(part="train", use="sft", heldout_fraction=0.3), seed=1)
    assert held_out.isdisjoint({talk.messages[0]["content"] for talk in spoken})


@given(st.text(), st.floats(0.01, 0.99))
def test_a_prompt_is_on_exactly_one_side(text: str, fraction: float) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
    assert in_part(messages, "train", fraction) != in_part(messages, "heldout", fraction)
    assert in_part(messages, "all", fraction)
    assert split_point(messages) == split_point(messages[1:])


def test_the_split_is_even() -> None:
    points = [split_point([{"role": "user", "content": f"prompt {index}"}]) for index in range(4000)]
    assert 0.17 < sum(point < 0.2 for point in points) / len(points) < 0.23


def test_system_prompt_goes_first_unless_there_is_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    prompts = load_prompts(config(jsonl(tmp_path, [{"prompt": "a"}, {"prompt": own}]), system_prompt="ours"), seed=0)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["ours", "own"]
    assert prompts[0].answer is None


def test_conversations_from_messages_completion_and_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": messages}, {"prompt": "a", "completion": "b", "answer": "x"}, {"prompt": "a", "answer": "{b}"}]
    made = load_conversations(config(jsonl(tmp_path, rows), use="sft", completion_template="\\boxed{{answer}}"), seed=0)
    assert [talk.messages for talk in made] == [
        messages,
        messages,
        [messages[0], {"role": "assistant", "content": "\\boxed{{b}}"}],
    ]


def test_conversations_of_a_generator() -> None:
    made = load_conversations(words(use="sft", rows_max=5, completion_template="<answer>{answer}</answer>"), seed=3)
    prompts = load_prompts(words(rows_max=5), seed=3)
    assert [talk.messages for talk in made] == [
        [*prompt.messages, {"role": "assistant", "content": f"<answer>{prompt.answer}</answer>"}] for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"answer": "4"}', ["rows.jsonl:2", "'prompt'", "answer", "prompt_field"]),
        ('{"prompt": "", "answer": "4"}', ["rows.jsonl:2", "'prompt' is ''"]),
        ('{"prompt": 3, "answer": "4"}', ["rows.jsonl:2", "'prompt' is 3"]),
        ('{"prompt": "q", "answer": null}', ["rows.jsonl:2", "'answer'", "first row"]),
        ('{"prompt": [{"role": "user"}], "answer": "4"}', ["rows.jsonl:2", "message 1", "'content'"]),
        (
            '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "4"}',
            ["rows.jsonl:2", "ends with the assistant"],
        ),
        ('{"prompt": "\\ud800", "answer": "4"}', ["rows.jsonl:2", "message 1", "text that can be stored"]),
        ("{prompt", ["rows.jsonl:2", "not JSON"]),
        ("[1]", ["rows.jsonl:2", "JSON object"]),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, said: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "answer": "a"}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        load_prompts(config(path), seed=0)
    assert all(part in str(caught.value) for part in said), caught.value


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q"}, ["rows.jsonl:1", "'completion'", "'answer'"]),
        ({"messages": []}, ["rows.jsonl:1", "'messages'"]),
        ({"messages": [{"role": "user", "content": "q"}]}, ["rows.jsonl:1", "assistant"]),
        ({"completion": "c"}, ["rows.jsonl:1", "'prompt'"]),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, row: dict[str, object], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_conversations(config(jsonl(tmp_path, [row]), use="sft"), seed=0)
    assert all(part in str(caught.value) for part in said), caught.value


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"source": "/nowhere/q.jsonl"}, ["data.mine.source", "/nowhere/q.jsonl", "no such file"]),
        ({"source": "questions.csv"}, ["data.mine.source", ".jsonl"]),
        ({"source": "datasets:/nowhere"}, ["data.mine.source", "/nowhere"]),
        ({"source": "reasoning_gym:spell_backwards", "rows_max": 3}, ["data.mine.source", "it has spell_backward"]),
        ({"source": "reasoning_gym:spell_backward", "rows_max": 3, "args": {"wrong": 1}}, ["data.mine.args", "wrong"]),
        ({"source": "reasoning_gym:spell_backward", "rows_max": 3, "args": {"min_word_len": -1}}, ["data.mine.args"]),
        ({"source": "reasoning_gym:spell_backward"}, ["data.mine.rows_max=0"]),
        (
            {"source": "reasoning_gym:spell_backward", "rows_max": 1, "part": "heldout", "heldout_fraction": 1e-9},
            ["data.mine.part"],
        ),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_prompts(config(**fields), seed=0)  # pyright: ignore[reportArgumentType]
    assert all(part in str(caught.value) for part in said), caught.value


def test_files_that_are_not_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("no")
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"rows.parquet: not a readable Parquet"):
        load_prompts(config(tmp_path / "rows.parquet"), seed=0)
    with pytest.raises(UserError, match="no rows"):
        load_prompts(config(tmp_path / "rows.jsonl"), seed=0)
    with pytest.raises(UserError, match=r"must contain \{answer\}"):
        load_conversations(words(use="sft", completion_template="x"), seed=0)


def test_plain_json_is_strict() -> None:
    value = {1: (1, 2.5), "nan": float("nan"), "set": {"b", "a"}, "path": Path("x"), "deep": [{"y": None}]}
    assert plain_json(value) == {"1": [1, 2.5], "nan": None, "set": ["a", "b"], "path": "x", "deep": [{"y": None}]}


def test_data_and_rewards_import_nothing_heavy() -> None:
    import subprocess

    modules = "rlpipe.data.sources, rlpipe.data.chat, rlpipe.data.cursor"
    heavy = ("torch", "transformers", "datasets", "reasoning_gym", "math_verify", "pyarrow")
    check = (
        f"import sys, {modules}, rlpipe.rewards.pool, rlpipe.algorithms.filters; print([m for m in {heavy} "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.strip() == "[]"


FUNCTIONS = """
def sums(largest, seed, rows_max, twist=0):
    for index in range(rows_max or 50):
        yield {"prompt": f"{index} + {seed % largest}?", "answer": index + seed % largest + twist, "level": (1, 2)}
def listed(): return [{"prompt": "a", "answer": None}, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
def endless():
    while True: yield {"prompt": "again"}
def breaks():
    yield {"prompt": "a"}
    raise OSError("no more")
def text(): return "abc"
def numbers(): return [{"prompt": "a"}, 7]
def rest(**arguments): return [{"prompt": name} for name in arguments]
"""  # noqa: E501


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_rows.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_rows", raising=False)


@pytest.mark.usefixtures("functions")
def test_a_function_makes_rows_from_its_arguments_and_the_seed() -> None:
    data = config("made_rows:sums", args={"largest": 10}, rows_max=3)
    prompts = load_prompts(data, seed=14)
    assert [(prompt.prompt_id, prompt.answer) for prompt in prompts] == [
        ("mine/0", "4"),
        ("mine/1", "5"),
        ("mine/2", "6"),
    ]
    assert prompts[0].messages == [{"role": "user", "content": "0 + 4?"}]
    assert prompts[0].metadata == {"level": [1, 2]}
    assert load_prompts(data, seed=15) != prompts
    assert len(load_prompts(config("made_rows:sums", args={"largest": 10}), seed=1)) == 50
    pinned = config("made_rows:sums", args={"largest": 10, "seed": 4, "twist": 1}, rows_max=1)
    assert [prompt.answer for prompt in load_prompts(pinned, seed=9)] == ["5"]
    part = config("made_rows:sums", args={"largest": 10}, part="heldout", heldout_fraction=0.5)
    assert 5 < len(load_prompts(part, seed=1)) < 45
    assert len(load_prompts(config("made_rows:endless", rows_max=4), seed=1)) == 4  # nothing beyond is made
    assert [
        prompt.messages[0]["content"] for prompt in load_prompts(config("made_rows:rest", args={"one": 1}), seed=1)
    ] == ["one"]


@pytest.mark.usefixtures("functions")
def test_a_function_makes_conversations() -> None:
    data = config("made_rows:sums", use="sft", args={"largest": 10}, rows_max=2, completion_template="It is {answer}.")
    assert load_conversations(data, seed=3)[1].messages == [
        {"role": "user", "content": "1 + 3?"},
        {"role": "assistant", "content": "It is 4."},
    ]


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("source", "fields", "said"),
    [
        ("made_rows:sums", {}, r"data\.mine\.args=\{\}.*largest.*declared \(largest, seed, rows_max, twist=0\)"),
        ("made_rows:sums", {"args": {"largest": 2, "wrong": 1}}, r"args=.*wrong"),
        ("made_rows:sums", {"args": {"largest": 0}}, r"source=made_rows:sums raised ZeroDivisionError"),
        ("made_rows:breaks", {}, r"source=made_rows:breaks raised OSError: no more"),
        ("made_rows:text", {}, r"returned a str; it must return a list of dicts"),
        ("made_rows:numbers", {}, r"made_rows:numbers row 2: a int, but every row must be a dict"),
        ("made_rows:listed", {}, r"made_rows:listed row 2: no 'prompt'"),
        ("made_rows:missing", {}, r"data\.mine\.source.*missing"),
        # written in C: it tells nothing of its parameters
        ("builtins:zip", {}, r"source=builtins:zip"),
        ("no_such_rows:sums", {}, r"data\.mine\.source: 'no_such_rows:sums' does not import"),
        ("not a path", {}, r"package\.module:function"),
    ],
)
def test_what_is_wrong_with_a_function_is_told_by_source_and_row(
    source: str, fields: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        load_prompts(config(source, **fields), seed=0)


def test_the_lines_of_gsm8k_in_the_docs_read_a_set_of_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's folder in small, at the path that the lines name:
    what is local goes before the hub."""
    files = [f"      - {{split: {split}, path: 'main/{split}.jsonl'}}" for split in ("train", "test")]
    configs = "\n".join(["---", "configs:", "  - config_name: main", "    data_files:", *files, "---", ""])
    (tmp_path / "openai/gsm8k/main").mkdir(parents=True)
    (tmp_path / "openai/gsm8k/README.md").write_text(configs)
    for split, total in (("train", 72), ("test", 18)):
        row = {"question": f"How many {split}?", "answer": f"It is 2 * <<2*3=6>>6.\n#### {total}"}
        (tmp_path / f"openai/gsm8k/main/{split}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/data.md").read_text()
    (block,) = [block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "openai/gsm8k" in block]
    train, test = PipelineConfig.model_validate(tomllib.loads(block)).data
    for data, split, total in ((train, "train", 72), (test, "test", 18)):
        (prompt,) = load_prompts(data, seed=0)
        assert prompt.messages == [{"role": "user", "content": f"How many {split}?"}]
        assert prompt.answer is not None and prompt.answer.endswith(f"#### {total}")
