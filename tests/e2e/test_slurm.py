"""infra/slurm on a real Slurm (tests/slurm_world.py): a pipeline whose trainer
and engines are two nodes each."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.services.registration import ENGINES, TRAINER, Registration, ServiceRecord
from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from tests import slurm_world
from tests.compose_world import ROOT
from tests.deadlines import PIPELINE_S, until
from tests.pipeline import IDLE_S, SLOW_WORDS
from tests.slurm_world import Slurm

pytestmark = pytest.mark.e2e
FLOW = "infra/slurm/flow.sbatch"
CONFIG = """
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 2
num_heads = 2
num_kv_heads = 1
context_tokens_max = 128
[[data]]
name = "slow"
use = "sft"
source = "slow_words:rows"
rows_max = 100
completion_template = "<answer>{answer}</answer>"
[[data]]
name = "words"
use = "rl"
source = "reasoning_gym:spell_backward"
rows_max = 200
[sft]
num_steps = 4
segment_steps = 4
decay_steps = 4
warmup_steps = 1
batch_size = 8
[rl]
num_iterations = 2
num_prompts = 8
group_size = 4
shard_prompts = 4
completion_tokens_max = 8
num_steps = 1
rewards = { reasoning_gym = 1.0 }
filters = {}
[trainer]
nodes = 2
[engines]
nodes = 2
[tracking]
uri = ""
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := slurm_world.unavailable():
        pytest.skip(why)
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()


def checkout(path: Path) -> Path:
    """A checkout as all nodes would see it: this one, with an infra/.env, and
    services that may be idle for IDLE_S."""
    for name in ("flows", "tasks", "rlpipe", ".venv", "pyproject.toml"):
        (path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "infra", path / "infra")
    (path / "infra" / ".env").write_text(
        f"RLPIPE_SERVICE_KEY=planted-key\nPYTHONPATH={path}\nPREFECT_HOME={path}/prefect\n"
    )
    for script in (path / "infra" / "slurm").iterdir():
        script.write_text(script.read_text().replace("--idle-timeout-s 900", f"--idle-timeout-s {IDLE_S}"))
    with (path / "infra" / ".env").open("a") as file:
        file.write(f"RLPIPE_SCRATCH={path}/disk\n")  # of the one node that this machine is
    (path / "my.toml").write_text(CONFIG)
    (path / "slow_words.py").write_text(SLOW_WORDS)
    return path


@pytest.mark.nightly
def test_a_run_on_slurm_ends_and_its_services_leave(slurm: Slurm, tmp_path: Path) -> None:
    """Not before it ends: the first preflight and the SFT take longer than they
    would wait for a run that is gone."""
    here = checkout(tmp_path)
    slurm.run("sbatch", "--job-name=rlpipe-first", FLOW, "my.toml", "first", f"file://{tmp_path}/store", cwd=here)
    check_ended(slurm, here, "first")
    for kind in ("trainer", "engines"):
        (log,) = here.glob(f"rlpipe-first-{kind}-*.log")
        assert "run first is worked on, or being prepared" in log.read_text()


@pytest.mark.nightly
def test_jobs_that_wait_in_the_queue_longer_than_anything_is_waited_for_keep_their_place_and_train(
    slurm: Slurm, tmp_path: Path
) -> None:
    """The GPUs are another's, and what a start that was killed left in the store answers nobody.

    Twice the limits go by in the queue, then the flow's own time, at which it is
    queued again: the same jobs train.
    """
    here, store = checkout(tmp_path), f"file://{tmp_path}/store"
    (here / "my.toml").write_text(CONFIG.replace("nodes = 2", "nodes = 2\nqueue_timeout_s = 60\nlost_timeout_s = 60"))
    for kind in (TRAINER, ENGINES):
        killed = ServiceRecord("node-0", "http://10.9.9.1:1")
        asyncio.run(Registration(open_store(store), "runs/held", kind, killed).enter())
    other = slurm.hold_gpus()
    flow = slurm.run("sbatch", "--parsable", "--job-name=rlpipe-held", FLOW, "my.toml", "held", store, cwd=here).strip()
    log = here / f"rlpipe-held-{flow}.log"
    said = re.compile(
        r"no trainer of the run answered within 1[2-9]\d s; Slurm job rlpipe-held-trainer: .* PENDING \(Resources\)"
    )

    def held() -> bool:
        assert slurm.states()["rlpipe-held"] in ("PENDING", "RUNNING"), log.read_text()
        return log.exists() and said.search(log.read_text()) is not None

    until(held, lambda: log.read_text(), within_s=PIPELINE_S, look_s=2)
    waiting = slurm.ids("rlpipe-held-trainer", "rlpipe-held-engines")
    # as five minutes before its time is over
    slurm.run("scancel", "--batch", "--signal=USR1", flow)
    until(lambda: slurm.states()["rlpipe-held"] == "PENDING", "it is queued again", look_s=1)
    slurm.run("scontrol", "update", f"JobId={flow}", "StartTime=now")  # Slurm lets a job rest that was queued again
    assert slurm.ids("rlpipe-held-trainer", "rlpipe-held-engines") == waiting
    slurm.run("scancel", other)
    check_ended(slurm, here, "held")
    assert all(list(here.glob(f"rlpipe-held-*-{job}.log")) for job in waiting), "those that waited have run"


def check_ended(slurm: Slurm, here: Path, run: str) -> None:
    """Waits for the jobs of a run: it has trained, its nodes are free again, and what was said on
    their disks is in the checkout."""
    names = {f"rlpipe-{run}{part}" for part in ("", "-trainer", "-engines")}
    not_ended = {None, "PENDING", "RUNNING", "COMPLETING"}

    def said() -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(here.glob("*.log")))

    until(lambda: not {slurm.states().get(name) for name in names} & not_ended, said, within_s=PIPELINE_S, look_s=2)
    logs = said()
    states = {name: state for name, state in slurm.states().items() if name in names}
    assert states.pop(f"rlpipe-{run}") == "COMPLETED", logs
    assert set(states.values()) == {"CANCELLED"}, "its nodes are free again"
    brought = list(here.glob(".rlpipe/n*/**/trainer.log"))
    assert len(brought) >= 2 and not any("SignalException" in log.read_text() for log in brought)
    assert {path.name[0] for path in (here / ".rlpipe").iterdir()} == {"n"}, "all else is on the disks of the nodes"
    opened = open_existing(open_store(f"file://{here}/store"), run)
    assert opened.policy(2)[1].weight_version == 2
    assert "planted-key" not in logs
