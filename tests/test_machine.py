"""What of this machine a run asks for: GPUs that are here, and an interpreter that has the engine; faults of a run, warnings of a plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlpipe.config.operational import EnginesConfig
from rlpipe.config.source import read_config
from rlpipe.engines.commands import check_python
from rlpipe.processes import launch
from rlpipe.processes.launch import check_gpus
from rlpipe.stages import preflight
from rlpipe.stages.content import Content
from rlpipe.types import UserError

PRESETS = Path(__file__).parent.parent / "flows" / "presets"


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev of two GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(launch, "DEVICES", tmp_path)
    return tmp_path


def test_gpus_that_are_not_here_are_named(devices: Path) -> None:
    check_gpus("trainer.gpu_ids", [0, 1])
    check_gpus("trainer.gpu_ids", [])
    with pytest.raises(UserError, match=r"^trainer\.gpu_ids=\[1, 2\]: not all .* \(its GPUs are 0 to 1\)"):
        check_gpus("trainer.gpu_ids", [1, 2])
    (devices / "kfd").touch()  # AMD's are not numbered there
    check_gpus("trainer.gpu_ids", [1, 2])


def test_a_machine_without_gpus_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DEVICES", tmp_path)
    with pytest.raises(UserError, match=r"^engines\.gpu_ids=\[0\]: .* \(it has none\)"):
        check_gpus("engines.gpu_ids", [0])


@pytest.mark.parametrize(
    ("python", "fault"),
    [
        ("/no/such/python", "cannot be run"),
        ("/etc/passwd", "cannot be run"),
        ("/bin/false", "no Python that runs"),
        ("a\0b", "cannot be run"),
        (sys.executable, "has no sglang, which engines.kind asks for"),
    ],
)
def test_an_interpreter_that_has_no_engine_is_refused(
    python: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang").mkdir()  # a folder of that name is no package
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"^engines\.python='.*{fault}.*name the interpreter of an environment that has it"):
        check_python(EnginesConfig(kind="sglang", python=python))


def test_one_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("rlpipe.engines.commands.PYTHON_TIMEOUT_S", 0.5)
    with pytest.raises(UserError, match=r"did not answer within 0\.5 s"):
        check_python(EnginesConfig(kind="vllm", python=str(tmp_path / "python")))


def test_one_that_has_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check_python(EnginesConfig(kind="vllm")) == f"engines: vllm of {sys.executable}"
    assert check_python(EnginesConfig(python="/no/such/python")) == ""  # the local engine is this process's own


def test_what_runs_elsewhere_is_not_asked_of_this_machine(devices: Path) -> None:
    here = ["model.dtype=bfloat16", "trainer.gpu_ids=[7]", "engines.count=1", "engines.gpu_ids=[8]"]
    content = Content(read_config("tiny", here, PRESETS), True)
    for look, name in ((content.trainer, "trainer"), (content.engines, "engines")):
        with pytest.raises(UserError, match=rf"^{name}\.gpu_ids="):
            look()
    elsewhere = Content(read_config("tiny", [*here, "trainer.place=elsewhere", "engines.place=elsewhere"], PRESETS), True)
    assert elsewhere.trainer() == elsewhere.engines() == ""


def test_a_run_is_refused_and_a_plan_warns(devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Content, "tokenizer", lambda _: "")
    monkeypatch.setattr(Content, "memory", lambda _: "")
    small = [f"data.{name}.rows_max=40" for name in ("words", "short_words", "all_words")]
    sets = [*small, f"store=file://{tmp_path}/store", "run=a", "model.dtype=bfloat16", "trainer.gpu_ids=[2]"]
    config = read_config("tiny", sets, PRESETS)
    planned = preflight.look_at(config)
    assert planned.faults == [] and any(line.startswith("trainer.gpu_ids=[2]: ") for line in planned.warnings)
    with pytest.raises(UserError, match=r"^trainer\.gpu_ids=\[2\]: "):
        preflight.preflight(config)
