"""Bad input that reaches a flow: a sample of every kind.

What the command line says of it, and the state of its flow run on a server.

`python -m tests.fuzz.flows FOLDER STORE EVERY`, in a process of its own, prints both of one case in
EVERY, a line of JSON a case. PREFECT_API_URL names the server.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prefect import get_client
from typer.testing import CliRunner

from flows import cli, cli_start
from flows.post_train import post_train
from rlpipe.config.source import read_config
from rlpipe.processes import user_code
from tests.fuzz import cases, models
from tests.fuzz.damage import damaged, damages

PRESETS = Path(cli.__file__).parent / "presets"
CHANGES: list[tuple[str, Any]] = [
    ("rl.no_such", 1), ("rl.group_size", 1), ("rl.group_size", 1.5), ("rl.clip_high", "x"), ("rl.rewards", {}),
    ("rl.estimator", "grop"), ("seed", -1),
    ("model.hidden_size", 12), ("data.words.part", "some"), ("run", "../x"), ("store", "gs://b"), ("trainer.nodes", 2),
    ("data.words.source", "gone.jsonl"),
]  # fmt: skip
ROWS = ("no prompt", "a number", "null", "half a character", "cut", "messages of text")
# the others take a process of their own, and preflight with it the ten seconds of a case
FOLDERS = (
    "config.json is away",
    "tokenizer.json is away",
    "model.safetensors is cut to 50%",
    "an index that leads out",
)
RECORDS = ("a/run.json: is empty", "a/run.json: config.run='b'", "a/run.json: config.rl.no_such=1",
           "a/rl/00001/iteration.json: away",
           "a/run.json: cut to 50%", "a/run.json: is brackets")  # fmt: skip
WAITS = "import time\ntime.sleep(600)\n"


class Asked(NamedTuple):
    """What a run is asked for, beside the preset tiny: fields and values."""

    kind: str
    name: str
    sets: dict[str, Any]


def asked(folder: Path, store: Path) -> Iterator[Asked]:
    """All of them, each with its damage done while it is looked at.

    `store`: one that `make_store` made.
    """
    rows = folder / "rows.jsonl"
    good = b"".join(
        json.dumps({"prompt": f"What is {n} + 2?", "answer": f"{n + 2}"}).encode() + b"\n" for n in range(5)
    )
    rows.write_bytes(good)
    small = {
        "run": "n",
        "store": f"file://{folder}/empty",
        "tracking.uri": "",
        "sft.num_steps": 0,
        "rl.rewards": {"exact": 1.0},
    }
    small |= {"data.words.source": str(rows), "data.words.part": "all"}
    for field, value in CHANGES:
        yield Asked("config", f"{field}={value!r}", small | {field: value})
    (folder / "waits.py").write_text(WAITS)
    yield Asked("functions", "an import that waits", small | {"rl.filters": {"waits:keeps": 0.0}})
    for name in ROWS:
        rows.write_bytes(good + cases.PROMPTS[name] + b"\n")
        yield Asked("data", name, small)
    rows.write_bytes(good)
    whole, model = models.make_folder(folder / "whole"), folder / "m"
    for damage in (each for each in models.damages() if each.name in FOLDERS):
        shutil.copytree(whole, model)
        damage.do(model)
        yield Asked("model folders", damage.name, small | {"model.path": str(model)})
        shutil.rmtree(model)
    for damage in (each for each in damages(store) if each.label in RECORDS):
        with damaged(store, store.parent / "kept", damage):
            yield Asked("stores", damage.label, {"run": "a", "store": f"file://{store}", "rl.num_iterations": 5})


def on_the_command_line(asked: Asked) -> str:
    """What `rlpipe run` says, a line for each fault; exit code 2."""
    sets = [part for field, value in asked.sets.items() for part in ("--set", f"{field}={_toml(value)}")]
    ended = CliRunner().invoke(cli.app, ["run", "tiny", *sets])
    said = ended.output.partition("rlpipe: ")[2].strip()
    assert ended.exit_code == 2 and said and said.count("\n") < 3, (asked.name, ended.output, repr(ended.exception))
    return said


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


async def on_the_server(asked: Asked) -> str:
    """The message of the state of a flow run that is asked for it as the form of a
    deployment asks: read from the server."""
    flow: Any = post_train
    state = await flow(changes=asked.sets, config=read_config("tiny", [], PRESETS), return_state=True)
    async with get_client() as client:
        told = (await client.read_flow_run(state.state_details.flow_run_id)).state
    assert told is not None and told.type == "FAILED" and told.message is not None, (asked.name, told)
    return told.message


def main(folder: Path, store: Path, every: int) -> None:
    user_code.IDLE_S = 1.0
    cli_start.run_to_end = lambda config, _: sys.exit(f"run {config.run} would start")
    for number, each in enumerate(asked(folder, store), 1):
        if number % every:
            continue
        began = time.process_time()
        both = [on_the_command_line(each), asyncio.run(on_the_server(each))]
        print(json.dumps([each.kind, each.name, time.process_time() - began, *both]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
