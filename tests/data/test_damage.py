"""Data that are damaged, odd or hostile: one line that names the file and row, or the
function, and never a traceback."""

import datetime
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe.base.errors import UserError
from rlpipe.config.sections import DataConfig
from rlpipe.data import rows
from rlpipe.data.sources import load_conversations, load_prompts
from rlpipe.processes import user_code
from tests.deadlines import until
from tests.living import until_gone

GOOD = b'{"prompt": "a", "answer": "1"}\n'
COLUMNS = {"prompt": ["a", "b"], "answer": ["1", "2"]}


def config(source: object, **fields: object) -> DataConfig:
    return DataConfig.model_validate({"name": "mine", "use": "rl", "source": str(source), **fields})


def refusal(data: DataConfig) -> str:
    """What is said of the data, which is one line."""
    with pytest.raises(UserError) as caught:
        load_prompts(data, 0)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 2000
    return message


def nested(depth: int) -> bytes:
    return b'{"prompt": "a", "answer": "1", "x": ' + b"[" * depth + b"]" * depth + b"}\n"


LINES = {
    "nested too deep": (nested(300), "nested deeper than 200"),
    "nested beyond Python": (nested(100_000), "not JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}\n', "not JSON"),
    "half a surrogate pair": (b'{"prompt": "a", "answer": "\\ud800"}\n', "no text"),
    "a long number": (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}\n", "not JSON"),
    "a line break in a name": (b'{"pro\\nmpt": "a", "answer": "1"}\n', "the row has: pro mpt, answer"),
    "a long value": (b'{"prompt": {"a": "' + b"x" * 100_000 + b'"}, "answer": "1"}\n', "'prompt' is {'a': 'xxx"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_is_named(name: str, tmp_path: Path) -> None:
    line, said = LINES[name]
    (tmp_path / "rows.jsonl").write_bytes(GOOD + line)
    message = refusal(config(tmp_path / "rows.jsonl"))
    assert message.startswith(f"{tmp_path}/rows.jsonl:2: ")
    assert said in message


def test_what_is_nested_not_too_deep_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(nested(150))
    assert len(load_prompts(config(tmp_path / "rows.jsonl"), 0)) == 1


def texts(*values: bytes) -> pa.Array:
    """Strings that nobody has looked at."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(values))]
    )


TABLES = {
    "a date beyond all years": ({**COLUMNS, "t": pa.array([0, 2**30], pa.date32())}, "row 2"),
    "a duration beyond all": ({**COLUMNS, "t": pa.array([0, 2**62], pa.duration("s"))}, "row 2"),
    "an unknown time zone": ({**COLUMNS, "t": pa.array([0, 1], pa.timestamp("us", tz="Mars/Olympus"))}, "row 1"),
    "no UTF-8": ({"prompt": texts(b"a", b"\xff\xfe"), "answer": ["1", "2"]}, "row 2"),
    "two fields of one name": (
        {**COLUMNS, "s": pa.StructArray.from_arrays([pa.array([1, 2])] * 2, names=["x", "x"])},
        "row 1",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_bad_value_of_parquet_is_named(name: str, tmp_path: Path) -> None:
    columns, row = TABLES[name]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    assert refusal(config(path)).startswith(f"{path} {row}: ")


@pytest.mark.parametrize("kind", ["", "datasets:"])
def test_a_link_out_of_a_folder_is_refused_and_one_in_the_hubs_cache_is_read(kind: str, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "datasets--a--b/snapshots/1/data", tmp_path / "datasets--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0123").write_bytes(GOOD)
    (snapshot / "rows.jsonl").symlink_to("../../../blobs/0123")
    folder = snapshot.parent
    assert len(load_prompts(config(f"{kind}{folder}"), 0)) == 1
    (tmp_path / "credentials.json").write_text('{"prompt": "a key", "answer": "1"}')
    (snapshot / "more.jsonl").symlink_to(tmp_path / "credentials.json")
    assert f"data/more.jsonl is a link to {tmp_path}/credentials.json, outside of" in refusal(config(f"{kind}{folder}"))
    if not kind:  # what is named is meant
        assert len(load_prompts(config(snapshot / "more.jsonl"), 0)) == 1


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["1"])], ["prompt", "prompt", "answer"]), path
    )
    assert "rows.parquet: not a readable Parquet file (ValueError: two columns are called 'prompt')" in refusal(
        config(path)
    )


@pytest.mark.parametrize(
    ("text", "said"), [(b"prompt,answer\na,1\nb,2,3\n", "line 3"), (b"prompt,answer\n\xff,1\n", "utf-8")]
)
def test_a_bad_csv_is_named(text: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(text)
    arguments = {"data_files": str(tmp_path / "rows.csv"), "cache_dir": str(tmp_path / "cache")}
    message = refusal(config("datasets:csv", args=arguments))
    assert str(tmp_path / "rows.csv") in message
    assert said in message


def damaged(original: bytes, numbers: random.Random) -> bytes:
    """The bytes with up to five flipped, sometimes cut; Parquet's
    footer more often than by chance."""
    data = bytearray(original)
    for _ in range(numbers.choice([1, 1, 2, 5])):
        first = numbers.choice([0, max(0, len(data) - 1500)])
        data[numbers.randrange(first, len(data))] ^= 1 << numbers.randrange(8)
    return bytes(data[: numbers.randrange(len(data))] if numbers.random() < 0.05 else data)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_flipped_bytes_end_in_rows_or_in_one_line(ending: str, tmp_path: Path) -> None:
    path, numbers = tmp_path / f"rows.{ending}", random.Random(25)
    made: list[dict[str, Any]] = [
        {
            "prompt": f"{index} é",
            "answer": str(index),
            "parts": [index, 1],
            "when": datetime.datetime(2020, 1, 1 + index % 28),
        }
        for index in range(60)
    ]
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(made), path, row_group_size=25)
    else:
        path.write_text("".join(json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in made))
    original, refusals = path.read_bytes(), list[str]()
    for _ in range(300):
        path.write_bytes(damaged(original, numbers))
        try:
            load_prompts(config(path), 0)
        except UserError as error:
            refusals.append(str(error))
    assert 50 < len(refusals) < 300
    assert [message for message in refusals if "\n" in message or f"rows.{ending}" not in message] == []


FUNCTIONS = """
import os, sys, time
from decimal import Decimal
from fractions import Fraction
import numpy as np

ODD = [(1, 2), {1: "x"}, {"b", "a"}, 0.1, np.float32(0.1), np.float64(0.5), np.int64(7), float("nan"), True, 10**30, Decimal("1.50"), Fraction(1, 3)]

def odd():
    for value in ODD:
        yield {"prompt": "a", "answer": value, "column": value, 5: b"x"}

def many(rows_max):
    for index in range(700):
        yield {"prompt": str(index), "answer": index}

def threads():
    yield {"prompt": "a", "answer": str(os.environ.get("OMP_NUM_THREADS"))}

def deep():
    value = []
    for _ in range(5000):
        value = [value]
    yield {"prompt": "a", "answer": "1"}
    yield {"prompt": "a", "x": value}

def huge():
    yield {"prompt": "a", "answer": 10**5000}

class Bad:
    def __str__(self):
        raise KeyError("no text")

def text():
    yield {"prompt": "a", "x": Bad()}

def hangs():
    yield {"prompt": "a"}
    time.sleep(600)

def exits():
    sys.exit(0)

def dies():
    yield {"prompt": "a"}
    os._exit(0)

def raises():
    yield {"prompt": "a"}
    raise ValueError("two\\nlines")
"""  # noqa: E501


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_rows.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("functions")
def test_a_function_in_its_process_gives_the_rows_that_it_gave_in_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Any] = [
        (1, 2), {1: "x"}, 0.1, np.float32(0.1), np.float64(0.5), np.int64(7), float("nan"), True,
        10**30, Decimal("1.50"), Fraction(1, 3),
    ]  # fmt: skip
    made = load_prompts(config("odd_rows:odd"), 0)
    asked = [
        prompt for prompt in made if prompt.metadata["column"] != ["a", "b"]
    ]  # the order of a set's text is chance
    assert [prompt.answer for prompt in asked] == [str(value) for value in values]
    assert [prompt.metadata for prompt in made] == [
        {"column": column, "5": "b'x'"}
        for column in ([1, 2], {"1": "x"}, ["a", "b"], 0.1, "0.1", 0.5, "7", None, True, 10**30, "1.50", "1/3")
    ]
    assert [prompt.answer for prompt in load_prompts(config("odd_rows:many"), 0)] == [
        str(index) for index in range(700)
    ]
    assert len(load_prompts(config("odd_rows:many", rows_max=300), 0)) == 300
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert load_prompts(config("odd_rows:threads"), 0)[0].answer == "None"
    conversation = config("odd_rows:odd", use="sft", rows_max=1, completion_template="{answer}")
    assert load_conversations(conversation, 0)[0].messages[1]["content"] == "(1, 2)"


@pytest.mark.slow
@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hangs", "gave no row in 3 s"),
        ("exits", "raised SystemExit: 0"),
        ("dies", "ended its process"),
        ("raises", "raised ValueError: two lines"),
        ("deep", "raised RecursionError"),
        ("huge", "raised ValueError: Exceeds the limit"),
        ("text", "raised KeyError: 'no text'"),
    ],
)
def test_a_function_that_goes_wrong_is_named(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "hangs":
        monkeypatch.setattr(rows, "ROW_TIMEOUT_S", 3.0)
    message = refusal(config(f"odd_rows:{name}"))
    assert message.startswith(f"data.mine.source=odd_rows:{name} {said}")


def test_a_function_whose_process_is_killed_once_while_it_loads_gives_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed_rows.py").write_text(
        f"import os, pathlib\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch()\n    os.kill(os.getpid(), 9)\n"
        "def once():\n    yield {'prompt': 'a'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(load_prompts(config("killed_rows:once"), 0)) == 1 and (tmp_path / "seen").exists()


OWNER = """
import os, sys
from rlpipe.config.sections import DataConfig
from rlpipe.data.sources import load_prompts
load_prompts(DataConfig(name="mine", use="rl", source="dying:rows"), 0)
"""


def test_the_process_of_a_function_dies_with_its_owner(tmp_path: Path) -> None:
    source = (
        "import os, time\ndef rows():\n    open('pid', 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n    yield {}\n"
    )
    (tmp_path / "dying.py").write_text(source)
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()})
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), running=owner))
    owner.kill()
    owner.wait()
    until_gone(pid)


def in_main(function: Callable[[], object]) -> object:
    return function()


def in_thread(function: Callable[[], object]) -> object:
    """As preflight does in a flow."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


@contextmanager
def others_at_work() -> Iterator[None]:
    """A thread that computes, and starts one process after the other."""
    enough = threading.Event()

    def work() -> None:
        while not enough.is_set():
            started = subprocess.Popen(["sleep", "0.2"])
            while started.poll() is None:
                sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("beside", [nullcontext, others_at_work])
@pytest.mark.parametrize("where", [in_main, in_thread])
def test_an_import_that_waits_is_given_up_with_its_name_and_line(
    where: Callable[..., object],
    beside: Callable[[], AbstractContextManager[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a thread that is left behind holds the lock of its module
    name = f"waits_{where.__name__}_{beside.__name__}"
    (tmp_path / f"{name}.py").write_text("import time\n\n\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(user_code, "IDLE_S", 0.3)
    said = rf"rl.rewards: '{name}:f' does not import \(TimeoutError: it has waited .*{name}.py:4\)"
    with pytest.raises(UserError, match=said), beside():
        where(lambda: user_code.load_function("rl.rewards", f"{name}:f"))


BUSY = "import time\nends = time.monotonic() + 1\nwhile time.monotonic() < ends: pass\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        BUSY + "f = print\n",
        "import subprocess\nsubprocess.run(['sleep', '1'])\nf = print\n",
        "import threading\ndef work():\n"
        + textwrap.indent(BUSY, "    ")
        + "one = threading.Thread(target=work)\none.start()\none.join()\nf = print\n",
    ],
)
@pytest.mark.parametrize("where", [in_main, in_thread])
def test_an_import_that_works_is_not_given_up(
    where: Callable[..., object], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "works.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "works", raising=False)
    monkeypatch.setattr(user_code, "IDLE_S", 0.5)
    assert where(lambda: user_code.load_function("rl.rewards", "works:f")) is print


def test_what_a_module_raises_is_said_alike_from_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_at_import.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for where in (in_main, in_thread):
        with pytest.raises(UserError, match=r"does not import \(SystemExit: 3 \(.*raises_at_import.py:2\)"):
            where(lambda: user_code.load_function("rl.rewards", "raises_at_import:f"))


NO_TEXT: dict[str, tuple[str, dict[str, Any], str]] = {  # use, a row, what is named
    "a prompt of bytes": ("rl", {"prompt": b"x"}, "'prompt' holds bytes (b'x')"),
    "an answer of bytes": ("rl", {"prompt": "x", "answer": b"4"}, "'answer' holds bytes (b'4')"),
    "a message of bytes": ("rl", {"prompt": [{"role": "user", "content": b"x"}]}, "'prompt' holds bytes (b'x')"),
    "a message of a date": ("rl", {"prompt": [{"role": "user", "content": datetime.date(2024, 1, 1)}]},
                            "'prompt' holds date"),
    "a turn of bytes": ("sft", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": b"x"}]},
                        "'messages' holds bytes"),
    "a turn of a time": ("sft", {"messages": [{"role": "assistant", "content": datetime.time(1)}]},
                         "'messages' holds time"),
    "a completion of bytes": ("sft", {"prompt": "q", "completion": b"x"}, "'completion' holds bytes"),
    "a completion made of bytes": ("sft", {"prompt": "q", "answer": b"x"}, "'answer' holds bytes"),
    "a number": ("sft", {"messages": [{"role": "assistant", "content": Decimal("1.5")}]}, "'messages' holds Decimal"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_not_trained_as_the_text_of_a_value_of_python(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, row, said = NO_TEXT[name]
    load = load_prompts if use == "rl" else load_conversations
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    (tmp_path / f"rows_{abs(hash(name))}.py").write_text(
        f"import datetime\nfrom decimal import Decimal\ndef rows():\n    return [{row!r}]\n"
    )
    monkeypatch.chdir(tmp_path)
    for source in (path, f"rows_{abs(hash(name))}:rows"):
        with pytest.raises(UserError) as refused:
            load(config(source, use=use, completion_template="{answer}"), 0)
        assert str(refused.value).startswith(f"{source} row 1: {said}") and "\n" not in str(refused.value)
