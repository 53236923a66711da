"""What the install scripts ask of a machine before they download anything, on played machines."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rlpipe.config.source import read_config
from rlpipe.engines.commands import EngineAddress, environment_of
from tests.deadlines import DEADLINE_S
from tests.paths import ROOT

TOOLS = ("bash", "cat", "cksum", "dirname", "head", "sed", "sort", "mkdir")
OURS, SGLANG = "install.sh", "sglang-gpu/install.sh"


class Machine:
    """A machine that has nothing but what is put into its folder of programs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self.bin.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None
            (self.bin / name).symlink_to(found)
        self.has("nvidia-smi", "case $1 in --query*) echo 580.95.05;; *) echo '| CUDA Version: 13.0     |';; esac")
        self.has("getconf", "echo glibc 2.39")
        self.has("gcc", "")
        self.has("c++", "")
        self.python("3.12.4")

    def has(self, name: str, program: str) -> None:
        """A program of this name; empty: one that ends well."""
        path = self.bin / name
        path.write_text(f"#!{self.bin}/bash\n{program}\n")
        path.chmod(0o755)

    def python(self, version: str, headers: bool = True) -> None:
        """A Python that says its version, has headers or none, and makes no virtual environment."""
        self.has("python3", f'case "$*" in *Python.h*) exit {int(not headers)};; *version_info*) echo {version};; '
                 f'*) echo "$*" >>{self.folder}/began; exit 9;; esac')  # fmt: skip

    def install(self, script: str, *options: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, output and errors of a script here. 9: it had nothing
        against this machine, and began."""
        ended = subprocess.run(
            [str(self.bin / "bash"), f"scripts/{script}", *options,
             *([str(self.folder / "venv")] if script == SGLANG else [])],
            cwd=self.folder, env={"PATH": str(self.bin), "HOME": str(self.folder), **environment},
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        began = (self.folder / "began").exists()
        assert began == (ended.returncode == 9), ended.stderr
        return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("script", [OURS, SGLANG])
def test_driver_glibc_and_python_are_said_first(machine: Machine, script: str) -> None:
    code, said, _ = machine.install(script)
    assert code == 9 and said.splitlines()[0] == "NVIDIA driver 580.95.05, up to CUDA 13.0, glibc 2.39, Python 3.12.4"


OLD_DRIVER = "case $1 in --query*) echo 570.86.10;; *) echo '| CUDA Version: 12.8     |';; esac"
COMPATIBLE = (
    "case $1 in --query*) echo 535.230.02;; *) echo '| CUDA UMD Version: 13.0  |';; esac"  # cuda-compat beside it
)
NO_HEADER = "case $1 in --query*) echo {};; esac"


@pytest.mark.parametrize("script", [OURS, SGLANG])
@pytest.mark.parametrize(
    ("programs", "wrong"),
    [
        ({"nvidia-smi": OLD_DRIVER},
         "NVIDIA driver 570.86.10 is too old for CUDA 13.*install 580.65 or newer.*cuda-compat-13-0"),
        ({"nvidia-smi": NO_HEADER.format("570.86.10")}, "NVIDIA driver 570.86.10 is too old"),
        ({"nvidia-smi": "echo 'NVIDIA-SMI has failed'; exit 9"}, "nvidia-smi is here and sees no GPU: mend the driver"),
        ({"nvidia-smi": COMPATIBLE}, ""),
        ({"nvidia-smi": NO_HEADER.format("610.12")}, ""),
        ({"gcc": "absent"}, "no C compiler.*apt-get install gcc"),
        ({"gcc": "absent", "clang": ""}, ""),
    ],
)  # fmt: skip
def test_what_a_gpu_wants_and_is_not_there_is_said_before_anything_is_downloaded(
    machine: Machine, script: str, programs: dict[str, str], wrong: str
) -> None:
    for name, program in programs.items():
        if program == "absent":
            (machine.bin / name).unlink()
        else:
            machine.has(name, program)
    check_refused(machine.install(script), wrong)


def check_refused(ended: tuple[int, str, str], wrong: str) -> None:
    """Refused for this reason, in one line; an empty one: begun."""
    code, _, errors = ended
    if not wrong:
        assert code == 9, errors
        return
    assert code == 2 and len(errors.splitlines()) == 1
    assert re.search(wrong, errors), errors


@pytest.mark.parametrize(
    ("script", "version", "glibc", "wrong"),
    [
        (OURS, "3.10.12", "2.39", r"Python 3\.11 or newer, this is 3\.10\.12: PYTHON=python3\.12 scripts/install\.sh"),
        (OURS, "3.14.0", "2.39", ""),
        (OURS, "3.12.4", "2.17", r"glibc 2\.28 or newer.*this is 2\.17"),
        (OURS, "3.12.4", "2.28", ""),
        (SGLANG, "3.10.12", "2.39", r"wheels for Python 3\.11, 3\.12 and 3\.13 only, this is 3\.10\.12"),
        (SGLANG, "3.14.0", "2.39", r"this is 3\.14\.0: PYTHON=python3\.12"),
        (SGLANG, "3.13.1", "2.34", ""),
        (SGLANG, "3.12.4", "2.31", r"glibc 2\.34 or newer.*this is 2\.31.*lmsysorg/sglang"),
        (SGLANG, "3.12.4", "none", r"this is none"),
    ],
)
def test_versions_without_wheels_are_refused_with_what_to_do(
    machine: Machine, script: str, version: str, glibc: str, wrong: str
) -> None:
    machine.python(version)
    machine.has("getconf", "exit 1" if glibc == "none" else f"echo glibc {glibc}")
    check_refused(machine.install(script), wrong)


@pytest.mark.parametrize("script", [OURS, SGLANG])
def test_pythons_headers_and_a_cpp_compiler_are_looked_for(machine: Machine, script: str) -> None:
    (machine.bin / "c++").unlink()
    check_refused(machine.install(script), "no C\\+\\+ compiler.*apt-get install g\\+\\+" if script == SGLANG else "")
    (machine.folder / "began").unlink(missing_ok=True)
    machine.python("3.12.4", headers=False)
    check_refused(machine.install(script), "Python's headers are missing.*apt-get install python3.12-dev")


def test_a_machine_without_gpus_needs_no_driver_and_no_compiler_unless_it_installs_for_others(machine: Machine) -> None:
    for name in ("nvidia-smi", "gcc", "c++"):
        (machine.bin / name).unlink()
    code, said, _ = machine.install(OURS)
    assert code == 9 and said.splitlines()[0] == "NVIDIA driver none, glibc 2.39, Python 3.12.4"
    assert machine.install(OURS, TORCH="cuda")[0] == 9
    machine.has("nvidia-smi", OLD_DRIVER)
    assert machine.install(OURS, TORCH="cpu")[0] == 9


def test_engines_on_gpus_find_the_nvcc_and_ninja_of_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else does: pip puts nvcc where neither SGLang nor torch looks."""
    home, address = (
        tmp_path / "venv/lib/python3.12/site-packages/nvidia/cu13",
        EngineAddress(0, "127.0.0.1", 1, ("a", "b")),
    )
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)

    def environment(*sets: str) -> dict[str, str]:
        python = [
            f"engines.python={tmp_path}/venv/bin/python",
            "model.dtype=bfloat16",
            "engines.kind=sglang",
            "engines.count=1",
        ]
        return environment_of(read_config("tiny", [*python, *sets], ROOT / "flows" / "presets"), address)

    on_gpu = "engines.gpu_ids=[0]"
    (home / "bin").mkdir(parents=True)
    assert "CUDA_HOME" not in environment(on_gpu), "there is no nvcc"
    (home / "bin" / "nvcc").touch()
    assert environment(on_gpu)["CUDA_HOME"] == str(home)
    assert environment(on_gpu)["PATH"].split(":")[0] == f"{tmp_path}/venv/bin"
    assert not {"CUDA_HOME", "PATH"} & environment().keys(), "an engine on a CPU compiles for no GPU"
    assert environment(on_gpu, 'engines.environment={CUDA_HOME="/opt/cuda"}')["CUDA_HOME"] == "/opt/cuda"
    monkeypatch.setenv("CUDA_PATH", "/usr/local/cuda")
    assert "CUDA_HOME" not in environment(on_gpu), "whoever set one chose"
    assert "CUDA_HOME" not in environment("engines.kind=local", on_gpu), "its own are Triton's"


def test_the_oldest_and_the_newest_versions_get_an_environment_beside_the_one_of_runs(machine: Machine) -> None:
    for option in ("--oldest", "--newest"):
        (machine.folder / "began").unlink(missing_ok=True)
        assert machine.install(OURS, option)[0] == 9
        assert (machine.folder / "began").read_text() == f"-m venv .venv-{option[2:]}\n"


def test_the_newest_torch_is_asked_for_again_where_an_older_one_is_and_is_no_cuda_s_on_a_machine_without_gpus(
    machine: Machine,
) -> None:
    """pip leaves alone what is there and fits, and of two indexes takes the newer
    torch, with gigabytes of CUDA."""
    (machine.bin / "nvidia-smi").unlink()
    (machine.folder / ".venv-newest" / "bin").mkdir(parents=True)
    machine.python("3.12.4")
    played = (machine.bin / "python3").read_text().replace("exit 9", "case $* in *torch.__version__*) exit 1;; esac")
    for name in (".venv-newest/bin/python", ".venv/bin/python"):
        (machine.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.folder / name).write_text(played)
        (machine.folder / name).chmod(0o755)
    asked: list[list[str]] = []
    for options in (["--newest"], ["test"]):
        subprocess.run(
            [str(machine.bin / "bash"), "scripts/install.sh", *options],
            cwd=machine.folder, timeout=DEADLINE_S, check=True,
            env={"PATH": str(machine.bin), "HOME": str(machine.folder)}, capture_output=True,
        )  # fmt: skip
        asked.append(re.findall(r"install (.*)", (machine.folder / "began").read_text()))
        (machine.folder / "began").unlink()
    cpu = "https://download.pytorch.org/whl/cpu"
    assert asked[0] == [
        f"-U torch<2.16 --index-url {cpu}",
        "-c .venv-newest/constraints.txt -U transformers<6 -e .[all,test]",
    ]
    assert asked[1] == ["torch==2.13.0+cpu", "-c constraints.txt -e .[all,test]"]


def test_what_pyproject_promises_is_what_the_oldest_environment_has() -> None:
    promised = dict(re.findall(r'"(torch|transformers)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    (line,) = re.findall(r"^--oldest\) (.*)$", (ROOT / "scripts/install.sh").read_text(), re.M)
    assert dict(re.findall(r'(torch|transformers)="==([\d.]+)\.0"', line)) == promised
