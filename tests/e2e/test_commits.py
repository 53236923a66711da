"""Weights are used before they are committed: a run that is killed while they are on their way to
S3 ends with the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S, PIPELINE_S
from tests.living import descendants
from tests.pipeline import MINI, Folder, Undisturbed, kill_group
from tests.s3_world import S3Proxy, S3Server

pytestmark = pytest.mark.e2e
ITERATIONS = 5


@pytest.fixture
def folder(tmp_path: Path, s3_server: S3Server, s3_proxy: S3Proxy, prefect_api: dict[str, str]) -> Folder:
    """A run's store is on S3, and every request of its processes goes through the proxy."""
    return Folder(tmp_path, s3_server.url(), {**s3_server.environment, "AWS_ENDPOINT_URL": s3_proxy.url, **prefect_api})


def hold(proxy: S3Proxy, *parts: str) -> None:
    """Holds up the writes of what has all of these in its path; the reads of a test pass."""
    proxy.held.clear()
    proxy.release.clear()
    proxy.drops = True
    proxy.holds = lambda method, target: method in ("PUT", "POST") and all(part in target for part in parts)


def let_go(proxy: S3Proxy) -> None:
    """What was held up never reached the server; who still lives sends it again."""
    proxy.holds = lambda method, target: False
    proxy.release.set()


def manifests(folder: Folder) -> dict[str, bytes]:
    """What is committed, by key."""
    store = folder.open_store()
    return {key: store.read(key) for key in store.list("runs/a") if key.endswith(("/manifest.json", "/iteration.json"))}


def start_until(folder: Folder, proxy: S3Proxy, key: str) -> subprocess.Popen[str]:
    """Starts the run; returns when something is held up, and `key` is in the store."""
    process = folder.start(*folder.run_arguments("a", *MINI))
    try:
        folder.wait_for("a", key, process)
        assert proxy.held.wait(DEADLINE_S), "nothing was held up"
    except BaseException:
        kill_group(process)
        raise
    return process


def check(folder: Folder, undisturbed: Undisturbed, committed: dict[str, bytes]) -> None:
    """The run ends as the undisturbed one does, whole, and with what
    was `committed` before as it was."""
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0, output
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.sha256()
    after = manifests(folder)
    assert {key: after.get(key) for key in committed} == committed, "something that was committed was done again"


def test_killed_while_a_policy_is_used_that_is_not_committed(
    folder: Folder, undisturbed: Undisturbed, s3_proxy: S3Proxy
) -> None:
    """In the middle of its upload; between the reload of the engines and its commit; between its
    commit and that of a shard it sampled."""
    committed: dict[str, bytes] = {}
    moments = [  # what is held up; what is committed by then; what is not
        (("rl/00000/policy/", "model.safetensors"), "rl/00001/prompts/round-0/", "rl/00000/policy/"),
        (
            ("rl/00002/policy/manifest.json",),
            "rl/00003/prompts/round-0/",
            "rl/00002/policy/",
        ),  # not evaluated: that waits for the commit
        (("rl/00004/rollouts/", "manifest.json"), "rl/00003/policy/", "rl/00004/rollouts/"),
    ]
    for held, there, missing in moments:
        hold(s3_proxy, *held)
        kill_group(start_until(folder, s3_proxy, f"{there}manifest.json"))
        let_go(s3_proxy)
        now = manifests(folder)
        assert not [key for key in now if missing in key], f"{missing} was committed too early"
        assert not [key for key in now if f"{missing.split('/')[1]}/iteration.json" in key]
        assert {key: now.get(key) for key in committed} == committed
        committed = now
    folder.complete("a", *MINI)
    check(folder, undisturbed, committed)


@pytest.mark.nightly
def test_the_trainer_is_killed_in_the_middle_of_an_upload_and_sampling_goes_on(
    folder: Folder, undisturbed: Undisturbed, s3_proxy: S3Proxy
) -> None:
    hold(s3_proxy, "rl/00002/policy/", "model.safetensors")
    process = start_until(folder, s3_proxy, "rl/00003/prompts/round-0/manifest.json")
    try:
        committed = manifests(folder)
        assert not [key for key in committed if "rl/00002/policy/" in key or "rl/00002/iteration.json" in key]
        descendants(process, "rlpipe.trainer.server")[-1].kill()
        let_go(s3_proxy)
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    assert "makes the files of" in (folder.path / "output.log").read_text()
    check(folder, undisturbed, committed)


@pytest.mark.nightly
@pytest.mark.parametrize("sets", [["rl.overlap=iteration"], ["checkpoint.full_every=3"]])
def test_the_trainer_is_killed_in_the_middle_of_an_upload_however_iterations_overlap(
    folder: Folder, tmp_path: Path, s3_server: S3Server, s3_proxy: S3Proxy, sets: list[str]
) -> None:
    """With rl.overlap = "iteration" it was training the next policy meanwhile."""
    alone = Folder(tmp_path / "alone", f"file://{tmp_path}/alone/store", folder.environment)
    alone.path.mkdir()
    alone.complete("a", *MINI, *sets)
    hold(s3_proxy, "rl/00001/policy/", ".safetensors")
    process = folder.start(*folder.run_arguments("a", *MINI, *sets))
    try:
        assert s3_proxy.held.wait(PIPELINE_S), "nothing was held up"
        descendants(process, "rlpipe.trainer.server")[-1].kill()
        let_go(s3_proxy)
        assert process.wait(timeout=PIPELINE_S) == 0, folder.said()
    finally:
        kill_group(process)
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    assert folder.final_sha256("a", ITERATIONS) == alone.final_sha256("a", ITERATIONS)


@pytest.mark.nightly
def test_an_outage_of_s3_is_named_and_the_next_start_goes_on(
    folder: Folder, undisturbed: Undisturbed, s3_proxy: S3Proxy
) -> None:
    """Every write of iteration 2's policy finds a server that does not
    answer, until the tries are over."""
    hold(s3_proxy, "rl/00002/policy/", "model.safetensors")
    process = start_until(folder, s3_proxy, "rl/00003/prompts/round-0/manifest.json")
    try:
        s3_proxy.loses = lambda request: True  # all answers, as of a server that is gone
        let_go(s3_proxy)
        assert process.wait(timeout=PIPELINE_S) != 0
    finally:
        kill_group(process)
    output = (folder.path / "output.log").read_text()
    assert "The disk, the network or the store failed" in output, output[-4000:]
    s3_proxy.loses = lambda request: False
    folder.complete("a", *MINI)
    check(folder, undisturbed, {})
