"""infra/slurm on a real Slurm (tests/slurm_world.py): a pipeline whose gang and engines are two nodes each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.store.backend import open_store
from rlpipe.store.run import open_existing
from tests import slurm_world
from tests.compose_world import ROOT
from tests.pipeline import IDLE_S, SLOW_WORDS
from tests.slurm_world import Slurm

pytestmark = pytest.mark.e2e
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
    """A checkout as all nodes would see it: this one, with an infra/.env, and services that may be idle for IDLE_S."""
    for name in ("flows", "tasks", "rlpipe", ".venv", "pyproject.toml"):
        (path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "infra", path / "infra")
    (path / "infra" / ".env").write_text(f"RLPIPE_SERVICE_KEY=planted-key\nPYTHONPATH={path}\nPREFECT_HOME={path}/prefect\n")
    for script in (path / "infra" / "slurm").iterdir():
        script.write_text(script.read_text().replace("--idle-timeout-s 900", f"--idle-timeout-s {IDLE_S}"))
    (path / "my.toml").write_text(CONFIG)
    (path / "slow_words.py").write_text(SLOW_WORDS)
    return path


def test_a_run_on_slurm_ends_and_its_services_leave(slurm: Slurm, tmp_path: Path) -> None:
    """Not before it ends: the first preflight and the SFT take longer than they would wait for a run that is gone."""
    here = checkout(tmp_path)
    submit = ["sbatch", "--job-name=rlpipe-first", "infra/slurm/flow.sbatch"]
    slurm.run(*submit, "my.toml", "first", f"file://{tmp_path}/store", cwd=here)
    end = time.monotonic() + 700
    while time.monotonic() < end and set(slurm.states().values()) & {"PENDING", "RUNNING", "COMPLETING"}:
        time.sleep(2)
    logs = "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(here.glob("*.log")))
    states = slurm.states()
    assert states.pop("rlpipe-first") == "COMPLETED", logs
    assert set(states) == {"rlpipe-first-trainer", "rlpipe-first-engines"}
    assert set(states.values()) == {"CANCELLED"}, "its nodes are free again"
    for kind in ("trainer", "engines"):
        (log,) = here.glob(f"rlpipe-first-{kind}-*.log")
        assert "run first is worked on, or being prepared" in log.read_text()
    assert not any("SignalException" in log.read_text() for log in here.glob(".rlpipe/**/trainer.log"))
    run = open_existing(open_store(f"file://{tmp_path}/store"), "first")
    assert run.policy(2)[1].weight_version == 2
    assert "planted-key" not in logs
