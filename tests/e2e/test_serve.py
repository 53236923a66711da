"""`rlpipe serve` and `rlpipe chat` over a real run: the openai package asks, signals end them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from rlpipe.algorithms.answers import STDERR
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.store.artifacts import read_records
from rlpipe.store.opening import open_existing
from tests.deadlines import DEADLINE_S
from tests.living import descendants, until_all_gone
from tests.pipeline import BIN, Undisturbed, kill_group

pytestmark = pytest.mark.e2e
KEY = "the key of this test"
VERSION, OLDER = 8, 4  # both evaluated


@pytest.fixture(scope="module")
def client(undisturbed: Undisturbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a server, which Ctrl-C ends with all that it started."""
    folder = tmp_path_factory.mktemp("serve")
    process = subprocess.Popen(
        [str(BIN / "rlpipe"), "serve", "a", "--store", undisturbed.folder.store, "--port", "0"],
        cwd=folder, env={**os.environ, "RLPIPE_SERVE_KEY": KEY},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith(f"a@{VERSION} answers at http://127.0.0.1:"), line
        with openai.OpenAI(base_url=line.split()[3].rstrip(";"), api_key=KEY, max_retries=0) as client:
            yield client
        engines = descendants(process, "local_engine")
        assert engines
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the engines too
        assert process.wait(timeout=DEADLINE_S) == 130
        until_all_gone(engines)
        assert not list(folder.rglob("serve-*")), "its copies of weights are gone"
    finally:
        kill_group(process)
        if process.stdout:
            process.stdout.close()


def greedy_rollouts(undisturbed: Undisturbed, version: int) -> list[Rollout]:
    run = open_existing(undisturbed.folder.open_store(), "a")
    ref, _ = run.committed(*run.policy_place(version), "evaluation")
    rollouts = read_records(run.store, ref, "evaluation.parquet", Rollout, SCORES)
    return [rollout for rollout in rollouts if rollout.rollout_index == 0]


def test_many_clients_at_once_get_what_the_evaluation_got(client: openai.OpenAI, undisturbed: Undisturbed) -> None:
    """And what each would get alone: greedy, whatever else is in the batch, streamed or not."""
    rollouts = greedy_rollouts(undisturbed, VERSION) * 4
    assert len(rollouts) >= 16

    def ask(place: int) -> tuple[str, list[float]]:
        fields = {"model": "a", "prompt": rollouts[place].prompt_tokens.tolist(), "temperature": 0, "logprobs": 1}
        if place % 2:
            choices = [client.completions.create(**fields, max_tokens=16).choices[0]]
        else:
            stream = client.completions.create(**fields, max_tokens=16, stream=True)
            choices = [choice for chunk in stream for choice in chunk.choices]
        logprobs = [one for choice in choices if choice.logprobs for one in choice.logprobs.token_logprobs or []]
        return "".join(choice.text for choice in choices), logprobs

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(ask, range(len(rollouts))))
    assert [ask(place) for place in range(4)] == replies[:4]
    for rollout, (text, logprobs) in zip(rollouts, replies, strict=True):
        assert text == rollout.completion
        assert logprobs == pytest.approx(rollout.rollout_logprobs.tolist(), abs=1e-6)


def test_a_seed_gives_the_same_again_and_another_one_does_not(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        reply = client.chat.completions.create(
            model=f"a@{VERSION}", messages=[{"role": "user", "content": "abc"}], seed=seed, n=4, max_tokens=8
        )
        return [choice.message.content for choice in reply.choices]

    first = ask(1)
    assert first == ask(1) != ask(2) and len(set(first)) > 1
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="none").models.list()


def chat(undisturbed: Undisturbed, folder: Path, *arguments: str) -> list[str]:
    return [str(BIN / "rlpipe"), "chat", "a", "--store", undisturbed.folder.store, "--tokens-max", "16", *arguments]


def test_two_versions_answer_each_line_that_is_piped_in(undisturbed: Undisturbed, tmp_path: Path) -> None:
    newer, older = (greedy_rollouts(undisturbed, version) for version in (VERSION, OLDER))
    place = next(place for place, pair in enumerate(zip(newer, older, strict=True)) if len({*map(text_of, pair)}) == 2)
    line = newer[place].prompt
    done = subprocess.run(
        chat(undisturbed, tmp_path, "--against", f"a@{OLDER}"), cwd=tmp_path, input=f"{line}\n\nand again",
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    first, *replies = done.stdout.splitlines()
    assert first.startswith(f"a@{VERSION} and a@{OLDER}: ")
    for rollouts, reply in ((newer, replies[0]), (older, replies[1])):
        text = text_of(rollouts[place])
        assert reply.split("> ", 1)[1].removesuffix(" (cut off)") == text
    assert [reply.split(">")[0] for reply in replies if reply] == [f"a@{VERSION}", f"a@{OLDER}"] * 2


def test_an_exported_policy_has_a_model_card(undisturbed: Undisturbed, tmp_path: Path) -> None:
    folder = undisturbed.folder
    code, said = folder.rlpipe("export", "a", "--to", str(tmp_path / "policy"), "--store", folder.store)
    assert code == 0, said
    card = (tmp_path / "policy" / "README.md").read_text()
    run = open_existing(folder.open_store(), "a")
    metrics = folder.evaluation("a", VERSION)
    for name in (name for name in metrics if not name.endswith(STDERR)):
        error = metrics.get(f"{name}{STDERR}")
        assert f"| {name} | {metrics[name]:.4g} | {'not known' if error is None else f'{error:.2g}'} |" in card
    digests = run.committed("data", 0, "data")[1].metrics["sets"]
    for part in (run.policy(VERSION)[0].sha256, *(facts["sha256"] for facts in digests.values()), "| `exact` | 0.5 |"):
        assert part in card
    assert (tmp_path / "policy" / "model.safetensors").is_file()


def text_of(rollout: Rollout) -> str:
    return rollout.completion


def test_a_chat_that_waits_for_a_line_ends_with_a_signal(undisturbed: Undisturbed, tmp_path: Path) -> None:
    process = subprocess.Popen(
        chat(undisturbed, tmp_path), cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout and process.stdin
        assert process.stdout.readline().startswith(f"a@{VERSION}: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_S) == 143
        process.stdin.close()
        process.stdout.close()
    finally:
        kill_group(process)
