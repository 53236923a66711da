"""A host is suspended in the middle of a run, another takes the run over, and the first wakes
up: one of them goes on, the other ends in one line, and the data have the bits of a run that
nobody disturbed. The two hosts are UTS namespaces; HEARTBEAT_S and STALE_S are short in their
processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from tests.deadlines import PIPELINE_S, until
from tests.pipeline import MINI, Folder, Undisturbed, kill_group

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
HURRIED = """import sys, rlpipe.store.lease as lease
lease.HEARTBEAT_S, lease.STALE_S = 1.0, 4.0
from flows.cli import app
sys.argv.pop(0)
app()"""
KEPT = ["checkpoint.full_every=3", "checkpoint.keep_policies_last=2", "checkpoint.keep_states=1"]
STAGES = {  # the first host is suspended when such a file is there
    "sft": "sft/00000/policy/manifest.json",
    "prompts": "rl/00001/prompts/round-0/manifest.json",
    "rollouts": "rl/00001/rollouts/round-0/shard-000/manifest.json",
    "scores": "rl/00001/scores/round-0/manifest.json",
    "batch": "rl/00001/batch/round-0/manifest.json",
    "upload": "rl/00001/policy/*/*",
    "delta": "rl/*/policy/*/delta.json",
    "gap": "rl/00001/gap/manifest.json",
    "state": "rl/00001/state/manifest.json",
    "evaluation": "rl/00001/evaluation/manifest.json",
    "iteration": "rl/00001/iteration.json",
    "pruned": "rl/*/policy/pruned.json",
}
NUM_ITERATIONS = 5


def host(path: Path, name: str, store: str) -> Folder:
    """A folder of its own, with a Prefect of its own, on a host of that name."""
    path.mkdir()
    named = ("unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh")
    return Folder(path, store, inside=(*named, sys.executable, "-c", HURRIED))


def suspend(flow: subprocess.Popen[str]) -> list[psutil.Process]:
    """Stops a flow's process, then all that it started, as a host
    that is suspended; returns them."""
    process = psutil.Process(flow.pid)
    process.suspend()  # from here on it starts no other
    stopped = [process, *process.children(recursive=True)]
    for each in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.suspend()
    return stopped


def wake(stopped: list[psutil.Process]) -> None:
    for each in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.resume()


def committed_under(run: Path, lease: int) -> bool:
    return any(json.loads(path.read_bytes()).get("lease") == lease for path in run.glob("**/manifest.json"))


def data(run: Run) -> dict[str, str]:
    """The sha256 of each file of data that manifests name, of the policies those of the SFT: others
    may be stored as differences."""
    found = {}
    for segment in range(run.config.sft.num_segments):
        for file in run.committed("sft", segment, "policy")[1].files:
            found[f"sft/{segment}/{file.plain_name}"] = file.sha256
    for iteration in range(NUM_ITERATIONS):
        shards = ("rollouts/round-0/shard-000", "rollouts/round-0/shard-001")
        for stage in ("prompts/round-0", *shards, "scores/round-0", "batch/round-0", "gap"):
            for file in run.committed("rl", iteration, stage)[1].files:
                found[f"{iteration}/{stage}/{file.plain_name}"] = file.sha256
    return found


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """An undisturbed run `a` that samples an iteration ahead."""
    path = tmp_path_factory.mktemp("ahead")
    folder = Folder(path, f"file://{path}/store")
    folder.complete("a", *MINI, "rl.overlap=iteration")
    return folder


@pytest.fixture
def alike(request: pytest.FixtureRequest, overlap: str) -> Folder:
    """Where the undisturbed run `a` is that comes to the same bits."""
    if overlap == "iteration":
        return request.getfixturevalue("ahead")
    undisturbed: Undisturbed = request.getfixturevalue("undisturbed")
    return undisturbed.folder


@pytest.mark.parametrize("overlap", ["none", "iteration"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_host_that_wakes_up_after_another_took_its_run_ends_in_one_line_and_harms_nothing(
    alike: Folder, tmp_path: Path, stage: str, overlap: str
) -> None:
    if subprocess.run(["unshare", "--uts", "sh", "-c", "hostname one"], capture_output=True).returncode:
        pytest.skip("a second host name needs root: unshare --uts is refused")
    store, run = f"file://{tmp_path}/store", tmp_path / "store/runs/a"
    one, two = host(tmp_path / "one", "one", store), host(tmp_path / "two", "two", store)
    sets = [*MINI, *KEPT, f"rl.overlap={overlap}", f"rl.num_iterations={NUM_ITERATIONS}"]
    first, second, asleep = one.start(*one.run_arguments("a", *sets)), None, list[psutil.Process]()
    try:
        until(lambda: any(run.glob(STAGES[stage])), one.said, running=first, within_s=PIPELINE_S, look_s=0.01)
        asleep = suspend(first)
        second = two.start(*two.run_arguments("a", *sets))
        until(lambda: committed_under(run, 1), two.said, running=second, within_s=PIPELINE_S, look_s=0.01)
        wake(asleep)
        codes = [flow.wait(timeout=PIPELINE_S) for flow in (first, second)]
    finally:
        wake(asleep)
        for flow in filter(None, (first, second)):
            kill_group(flow)
    outputs = [(folder.path / "output.log").read_text() for folder in (one, two)]
    assert codes == [2, 0], "\n\n".join(output[-4000:] for output in outputs)
    assert outputs[0].count("taken over by host two (pid ") == 1 and "Traceback" not in outputs[0], outputs[0][-4000:]
    assert sorted(path.name for path in run.glob("lease/*")) == ["000000.json", "000001.json"]
    code, output = two.rlpipe("verify", "a", "--store", store)
    assert code == 0, output
    assert data(open_existing(two.open_store(), "a")) == data(open_existing(alike.open_store(), "a"))
    for version in (NUM_ITERATIONS - 1, NUM_ITERATIONS):
        assert two.final_sha256("a", version) == alike.final_sha256("a", version)
