"""What of this machine a run asks for: GPUs that are here, and an interpreter that has the engine;
faults of a run, warnings of a plan."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
from pathlib import Path

import pytest

from rlpipe.base.errors import UserError
from rlpipe.checks import preflight
from rlpipe.checks.content import Content
from rlpipe.config.operational import EnginesConfig
from rlpipe.config.source import read_config
from rlpipe.engines.commands import CUDA_HOMES, EngineAddress, check_python, environment_of, toolkit_environment
from rlpipe.processes import gpus
from rlpipe.processes.gpus import check_gpus, gpu_environment, gpu_gib
from rlpipe.trainer.process import TrainerProcesses
from tests.paths import PRESETS


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev of two GPUs, all of which this process may use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    return tmp_path


def test_gpus_that_are_not_here_are_named(devices: Path) -> None:
    check_gpus("trainer.gpu_ids", [0, 1])
    check_gpus("trainer.gpu_ids", [])
    with pytest.raises(UserError, match=r"^trainer\.gpu_ids=\[1, 2\]: not all .* \(its GPUs are 0 to 1\)"):
        check_gpus("trainer.gpu_ids", [1, 2])
    (devices / "kfd").touch()  # AMD's are not numbered there
    check_gpus("trainer.gpu_ids", [1, 2])


def test_a_machine_without_gpus_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    with pytest.raises(UserError, match=r"^engines\.gpu_ids=\[0\]: .* \(it has none\)"):
        check_gpus("engines.gpu_ids", [0])


@pytest.mark.parametrize(
    # by children that are given [1] and [0], as CUDA itself reads what is inherited
    ("inherited", "seen"),
    [
        ("6,7", ["7", "6"]),
        (" 6 , 7,3", ["7", "6"]),
        ("GPU-8f1c,GPU-0a2b", ["GPU-0a2b", "GPU-8f1c"]),
        ("MIG-3eb8,MIG-GPU-8f1c/1/0", ["MIG-GPU-8f1c/1/0", "MIG-3eb8"]),
        ("6", "there is no GPU but 0"),
        ("6,-1,7", "there is no GPU but 0"),
        ("GPU-8f1c,7", "there is no GPU but 0"),
        ("", "there is no GPU;"),
        ("NoDevFiles", "there is no GPU;"),
        ("6,6", "there is no GPU;"),
    ],
)
def test_the_gpus_of_a_job_are_those_that_it_inherited(
    inherited: str, seen: list[str] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    sets = [
        "model.dtype=bfloat16",
        "engines.kind=sglang",
        "engines.count=2",
        "trainer.gpu_ids=[1]",
        "engines.gpu_ids=[3,0]",
    ]
    config = read_config("tiny", sets, PRESETS)
    trainer = TrainerProcesses(config, tmp_path, "key")
    if isinstance(seen, str):
        with pytest.raises(UserError, match=rf"^trainer\.gpu_ids=\[1\]: with CUDA_VISIBLE_DEVICES={inherited} {seen}"):
            trainer._environment()
        with pytest.raises(UserError, match=r"^engines\.gpu_ids=\[3, 0\]: with CUDA_VISIBLE_DEVICES="):
            check_gpus("engines.gpu_ids", config.engines.gpu_ids, 2)
        return
    engine = environment_of(config, EngineAddress(1, "127.0.0.1", 8000, ("", "")))
    assert [trainer._environment()["CUDA_VISIBLE_DEVICES"], engine["CUDA_VISIBLE_DEVICES"]] == seen
    assert "CUDA_DEVICE_ORDER" not in engine, "6 means to a child what it means to whoever set it"


def test_children_count_gpus_as_nvidia_smi_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    assert gpu_environment("trainer.gpu_ids", [2, 3]) == {
        "CUDA_VISIBLE_DEVICES": "2,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert gpu_environment("trainer.gpu_ids", [2]) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert gpu_environment("trainer.gpu_ids", []) == {}


def test_a_process_has_one_mig_instance(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3eb8,MIG-91c4")
    check_gpus("engines.gpu_ids", [0, 1], 2)
    with pytest.raises(UserError, match=r"^engines\.gpu_ids=\[0, 1\]: CUDA shows a process one MIG instance"):
        check_gpus("engines.gpu_ids", [0, 1], 1)


NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) cat <<'END'
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8f1c)
  MIG 1g.10gb     Device  0: (UUID: MIG-3eb8)
  MIG 3g.40gb     Device  1: (UUID: MIG-91c4)
GPU 1: NVIDIA T400 4GB (UUID: GPU-0a2b)
END
;;
*) printf '0, GPU-8f1c, 81559\\n1, GPU-0a2b, 4096\\n' ;;
esac
"""


@pytest.mark.parametrize(
    ("inherited", "order", "gpu_ids", "gib"),
    [
        (None, None, [0], 79.6),
        (None, None, [1, 0], 4),
        (None, "FASTEST_FIRST", [0], 4),  # 0 may be any of them
        ("0,1", None, [0], 4),
        ("1,0", "PCI_BUS_ID", [1], 79.6),
        ("GPU-0a2b,GPU-8f1c", None, [1], 79.6),
        ("MIG-91c4,MIG-3eb8", None, [0], 36.8),
        ("MIG-91c4,MIG-3eb8", None, [1], 9.2),
        ("GPU-ffff", None, [0], None),
        ("1", "PCI_BUS_ID", [1], None),
        (None, None, [2], None),
    ],
)
def test_a_size_is_that_of_the_gpu_that_a_child_gets(
    inherited: str | None,
    order: str | None,
    gpu_ids: list[int],
    gib: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in (("CUDA_VISIBLE_DEVICES", inherited), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert gpu_gib(gpu_ids) == (gib and pytest.approx(gib, abs=0.1))


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
    with pytest.raises(
        UserError, match=rf"^engines\.python='.*{fault}.*name the interpreter of an environment that has it"
    ):
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
    content = Content(read_config("tiny", here, PRESETS))
    for look, name in ((content.trainer, "trainer"), (content.engines, "engines")):
        with pytest.raises(UserError, match=rf"^{name}\.gpu_ids="):
            look()
    elsewhere = Content(read_config("tiny", [*here, "trainer.place=elsewhere", "engines.place=elsewhere"], PRESETS))
    assert elsewhere.trainer() == elsewhere.engines() == ""


@pytest.mark.slow
def test_a_run_is_refused_and_a_plan_warns(devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Content, "tokenizer", lambda _: "")
    small = [f"data.{name}.rows_max=40" for name in ("words", "short_words", "all_words")]
    sets = [*small, f"store=file://{tmp_path}/store", "run=a", "model.dtype=bfloat16", "trainer.gpu_ids=[2]"]
    config = read_config("tiny", sets, PRESETS)
    planned = preflight.look_at(Content(config))
    assert planned.faults == [] and any(line.startswith("trainer.gpu_ids=[2]: ") for line in planned.warnings)
    with pytest.raises(UserError, match=r"^trainer\.gpu_ids=\[2\]: "):
        preflight.preflight(config)


def test_a_gpu_trainer_without_a_c_compiler_or_headers_is_refused_before_it_starts(
    devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton wants both, and training would fall to one sequence a row without them."""
    config = read_config("tiny", ["model.dtype=bfloat16", "trainer.gpu_ids=[1]", "run=a"], PRESETS)
    look = Content(config).trainer
    (tmp_path / "bin").mkdir()
    monkeypatch.delenv("CC", raising=False)
    assert look() == ""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match=r"^trainer\.gpu_ids: no C compiler \(gcc, clang\).*apt-get install gcc"):
        look()
    with pytest.raises(UserError, match=r"^trainer\.gpu_ids: no C compiler"):  # on whichever node it is
        asyncio.run(TrainerProcesses(config, tmp_path / "work", "key").start())
    assert not (tmp_path / "work").exists(), "nothing was started"
    (tmp_path / "bin" / "clang").touch(mode=0o755)
    assert look() == ""
    monkeypatch.setenv("CC", "icx")
    with pytest.raises(UserError, match="CC=icx is no program"):
        look()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path / "include"))
    with pytest.raises(
        UserError, match=r"^trainer\.gpu_ids: no Python\.h in .*/include.*apt-get install python3\.\d+-dev"
    ):
        look()
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path}")
    assert look() == ""
    assert Content(read_config("tiny", ["run=a"], PRESETS)).trainer() == "", "on a CPU nothing is compiled"


@pytest.mark.parametrize("named", ["python", "{programs}/python"])
def test_an_engine_finds_the_compilers_of_its_own_environment(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, cuda = tmp_path / "bin", tmp_path / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13"
    for file in (programs / "python", cuda / "bin" / "nvcc"):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin")
    for name in CUDA_HOMES:
        monkeypatch.delenv(name, raising=False)
    python = Path(named.format(programs=programs))
    assert toolkit_environment(python) == {"PATH": f"{programs}:{programs}:/usr/bin", "CUDA_HOME": str(cuda)}
    monkeypatch.setenv("CUDA_PATH", "/opt/cuda")
    assert toolkit_environment(python) == {"PATH": f"{programs}:{programs}:/usr/bin"}
