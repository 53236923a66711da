"""Bad and odd input of every kind, some two and a half thousand cases: each ends in ten seconds, in
one line that names what is wrong, and nothing is written; a flow run says the same line. The cases
are in cases.py, damage.py, models.py, bodies.py and flows.py; how many there are of each kind, and
which was slowest, is printed."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flows import cli, cli_start
from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.sections import DataConfig
from rlpipe.config.source import read_config
from rlpipe.data.sources import load_conversations, load_prompts
from rlpipe.extras.local_engine import protocol
from rlpipe.extras.local_engine.model import LocalModel
from rlpipe.extras.local_engine.scheduler import Scheduler
from rlpipe.extras.local_engine.server import Routes
from rlpipe.rewards.http import HttpScorer, RewardService
from rlpipe.store import audit
from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from rlpipe.trainer.jobs import check_place, job_of
from tests import trainer_world as world
from tests.deadlines import DEADLINE_S, PIPELINE_S
from tests.engine_fixtures import CONTEXT_TOKENS, VOCAB, tiny_model
from tests.fuzz import cases, models, timed
from tests.fuzz.bodies import Body, bodies
from tests.fuzz.damage import Damage, contents, damaged, damages, make_store, readers
from tests.fuzz.timed import LINE_CHARS_MAX, case, refused
from tests.paths import PRESETS

pytestmark = pytest.mark.e2e
EVERY = 8  # of the damages one is done in `make test-all`: all take minutes on a busy machine


@pytest.fixture(scope="module", autouse=True)
def told_by_kind() -> Iterator[None]:
    """How many cases there were, by kind, and which took longest."""
    yield
    print("", *timed.lines(), sep="\n")
    assert len(timed.counted) < 12 or timed.counted.total() >= 2000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "store"
    make_store(open_store(f"file://{folder}"))
    return folder


def test_config_values() -> None:
    for override, words in cases.CONFIG.items():
        assert words in refused(
            "config values", override, lambda o=override: open_store(read_config("tiny", [o], PRESETS).store)
        ), override


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for name, data in cases.FILES.items():
        path.write_bytes(data)
        message = refused("config files", name, lambda: read_config(str(path), [], PRESETS))
        assert message, name


def test_command_lines(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli_start, "run_to_end", lambda config, _: pytest.fail(f"run {config.run} would start"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / "a_file").write_text("no store")
    before, wrong = contents(store), []
    for line, words in cases.COMMANDS:
        arguments = shlex.split(line)
        reads = (
            arguments[0] not in ("run", "plan", "fields", "nope", "--nope", "automations")
            and "--store" not in arguments
        )
        with case("command lines", line):
            ended = CliRunner().invoke(cli.app, [*arguments, *(["--store", str(store)] if reads else [])])
        ours = [each for each in ended.output.splitlines() if each.startswith("rlpipe: ")]
        fine = ended.exit_code == 2 and words in ended.output and "Traceback" not in ended.output
        if not fine or (ours and len(ended.output.splitlines()) != 1):
            wrong.append((line, ended.exit_code, ended.output[-300:], repr(ended.exception)))
    assert not wrong
    assert contents(store) == before and [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for name, row in cases.PROMPTS.items():
        path.write_bytes(b'{"prompt": "q", "answer": "a"}\n' + row + b"\n")
        data = DataConfig.model_validate({"name": "mine", "use": "rl", "source": str(path)})
        assert "rows.jsonl:2" in refused("rows of prompts", name, lambda d=data: load_prompts(d, seed=0)), name
    for name, row in cases.CONVERSATIONS.items():
        path.write_bytes(row + b"\n")
        data = DataConfig.model_validate({"name": "mine", "use": "sft", "source": str(path)})
        assert "rows.jsonl:1" in refused("rows of conversations", name, lambda d=data: load_conversations(d, seed=0)), (
            name
        )


def test_model_folders(tmp_path: Path) -> None:
    whole, folder, wrong = models.make_folder(tmp_path / "whole"), tmp_path / "m", []
    for damage in models.damages():
        shutil.copytree(whole, folder)
        damage.do(folder)
        said = refused("model folders", damage.name, lambda d=damage: models.look_at(folder, d))
        shutil.rmtree(folder)
        if "\n" in said or damage.words not in said or str(folder) not in said:
            wrong.append((damage.name, said))
    for damage in models.harmless():
        shutil.copytree(whole, folder)
        damage.do(folder)
        with case("model folders that are taken", damage.name):
            models.look_at(folder, damage)
        shutil.rmtree(folder)
    assert not wrong


def named(store: Path, damage: Damage) -> list[str]:
    """What is wrong with how the commands take a damage."""
    said: dict[str, Any] = {}
    for command, read in readers(open_store(f"file://{store}")).items():
        try:
            said[command] = read()
        except (UserError, StoreError, OSError) as error:
            said[command] = error
    failed = {command: str(error) for command, error in said.items() if isinstance(error, Exception)}
    wrong = [
        f"{damage.label}: {command} said {text:.400}"
        for command, text in failed.items()
        if "\n" in text or len(text) > LINE_CHARS_MAX
    ]
    if "runs" in failed or not any(line.startswith("c ") and "RL iterations 1/" in line for line in said["runs"]):
        wrong.append(f"{damage.label}: runs hides the run c: {said['runs']}")
    if failed and not any(said[verify] for verify in ("verify a", "verify b")):
        wrong.append(f"{damage.label}: verify has no fault, and {failed}")
    return wrong


@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.nightly)])
def test_damaged_stores(store: Path, every: int) -> None:
    wrong, unseen = [], []
    for damage in list(damages(store))[::every]:
        with damaged(store, store.parent / "kept", damage):
            with case("damaged stores", damage.label):
                wrong += named(store, damage)
            if damage.name.startswith(("cut", "is ", "a byte", "away", "a folder", "a link")) and damage.key.endswith(
                ".json"
            ):
                texts = [str(each) for each in _faults(store)]
                unseen += (
                    []
                    if any("runs/" in text or "no run '" in text for text in texts) or "lease" in damage.key
                    else [damage.label]
                )
    assert not wrong and not unseen


def _faults(store: Path) -> Iterator[object]:
    for name in ("a", "b"):
        try:
            yield from audit.verify(open_existing(open_store(f"file://{store}"), name))[1]
        except (UserError, StoreError, OSError) as error:
            yield error


ENGINE: dict[str, dict[str, Any]] = {
    "/generate": {
        "input_ids": [[5, 6, 7]], "return_logprob": True, "logprob_start_len": 0, "rid": ["a"],
        "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5,
                            "stop_token_ids": [3], "sampling_seed": 7, "n": 1,
                            "ignore_eos": False, "min_new_tokens": 1},
    },
    "/pause_generation": {"mode": "retract"}, "/continue_generation": {},
    "/abort_request": {"rid": "a", "abort_all": False}, "/flush_cache": {},
    "/update_weights_from_disk": {"model_path": "", "weight_version": "3"}, "/weights_checker": {"action": "checksum"},
}  # fmt: skip


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Scheduler]:
    with torch.inference_mode():
        scheduler = Scheduler(LocalModel(str(tiny_model(0)), "cpu", 8), "1", torch.get_num_threads())
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    yield scheduler
    assert thread.is_alive(), "a body ended the engine"
    scheduler.stop()
    thread.join()


async def post(scheduler: Scheduler, sent: list[Body]) -> list[tuple[str, str, int, int]]:
    """Route, what was wrong, status and length of the answer of each."""
    app = Routes(scheduler, protocol.ModelLimits(VOCAB, CONTEXT_TOKENS, (1,)), "", "").app()
    answers = []
    async with TestClient(TestServer(app)) as client:
        for body in sent:
            with case("bodies to the local engine", f"{body.path} {body.name}"):
                answer = await asyncio.wait_for(client.post(body.path, data=body.data), DEADLINE_S)
            answers.append((body.path, body.name, answer.status, len(await answer.read())))
            if body.path == "/pause_generation":
                assert (await client.post("/continue_generation", json={})).status == 200
    return answers


async def test_bodies_to_the_local_engine(scheduler: Scheduler) -> None:
    good = {**ENGINE, "/update_weights_from_disk": {"model_path": str(tiny_model(0)), "weight_version": "3"}}
    sent = [body for path, each in good.items() for body in bodies(path, each)]
    answers = await post(scheduler, sent)
    assert [
        each for each in answers if each[2] not in (200, 400) or (each[2] == 400 and each[3] > LINE_CHARS_MAX)
    ] == []
    assert sum(each[2] == 400 for each in answers) > 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=st.fixed_dictionaries({}, optional=dict.fromkeys([*ENGINE["/generate"], "x"], JSON)),
       sampling=st.dictionaries(
    st.sampled_from([*ENGINE["/generate"]["sampling_params"]]), JSON))  # fmt: skip
def test_any_body_of_generate(scheduler: Scheduler, body: dict[str, Any], sampling: dict[str, Any]) -> None:
    for tree in (body, {**ENGINE["/generate"], "sampling_params": {"max_new_tokens": 1, **sampling}}):
        said = ""
        with case("any bodies to the local engine", repr(tree)):
            try:
                protocol.parse_generate(tree, protocol.ModelLimits(VOCAB, CONTEXT_TOKENS, (1,)), "id", 7)
            except protocol.BadRequest as error:
                said = str(error)
        assert len(said) < LINE_CHARS_MAX


def test_bodies_to_the_trainer() -> None:
    ref = ArtifactRef("runs/a/rl/00001/batch/round-0", "0" * 64)
    good = [("load", world.load_new()), ("load", world.load_ref("p", "state", ref)),
            ("train", world.train("p", "q", "rl", ref)),
            ("train", world.train("p", "q", "sft", ref)),
            ("save", world.save("p", "runs/a/rl/00001/policy", "runs/a/rl/00001/state"))]  # fmt: skip
    for kind, each in good:
        check_place(job_of(kind, json.dumps(each).encode()), "a")
        for body in bodies(f"/{kind}", each):
            said = kind
            with case("bodies to the trainer", f"{kind} {body.name}"):
                try:
                    check_place(job_of(kind, body.data), "a")
                except UserError as error:
                    said = str(error)
            assert "\n" not in said and len(said) < LINE_CHARS_MAX and kind in said, (body.name, said)
    wrong = [
        "",
        "/",
        "policy",
        "runs",
        "runs/a",
        "runs/b/base/policy",
        "runs/a/rl/00001/state",
        "runs/a/rl/1/policy",
        "../x",
    ]
    for folder in [*wrong, "runs/a/rl/00001/policy/", "runs/a/base/policy\n"]:
        job = {**good[-1][1], "policy_folder": folder}
        assert "policy_folder" in refused(
            "folders of a save", folder, lambda j=job: check_place(job_of("save", json.dumps(j).encode()), "a")
        )


async def test_answers_of_a_reward_service() -> None:
    names = {f"/{index}": name for index, name in enumerate(cases.ANSWERS)}

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=cases.ANSWERS[names[request.path]])

    app = web.Application()
    app.router.add_post("/{index}", answer)
    async with TestServer(app) as server:
        for path, name in names.items():
            scorer = HttpScorer("remote", 1.0, DEADLINE_S, RewardService(url=str(server.make_url(path))))
            item: Any = {"prompt": {"messages": [], "answer": None, "metadata": {}}, "completion": "x"}
            with case("answers of a reward service", name):
                (score,) = await asyncio.to_thread(scorer.score, [item])
            assert score.reward is None and score.reason == "reward_invalid" and score.message, name
            assert "\n" not in score.message and len(score.message) < LINE_CHARS_MAX, name


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_state_of_a_flow_run_says_what_the_command_line_says(
    store: Path, tmp_path: Path, prefect_api: dict[str, str], every: int
) -> None:
    before, environment = contents(store), {**os.environ, **prefect_api, "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
    command = [sys.executable, "-m", "tests.fuzz.flows", str(tmp_path), str(store), str(every)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PIPELINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for kind, name, took_s, _, _ in told:
        timed.ended(f"flow runs: {kind}", name, took_s)
    assert [each for each in told if each[3].rstrip(".") not in each[4]] == [] and len(told) >= 30 // every
    assert {kind for kind, *_ in told} == {"config", "functions", "data", "model folders", "stores"}
    # of an announcement, which a preflight of more than ten seconds makes and withdraws, the
    # store's own folder stays
    assert contents(store) == before and not [*(tmp_path / "empty").rglob("*")]
