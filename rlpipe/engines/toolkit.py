"""The compilers with which SGLang and vLLM build kernels on a GPU, at their first request: nvcc and
ninja of the engines' own environment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
# of pip's packages of CUDA 13 and newer
CUDA_WHEELS = "lib/python3.*/site-packages/nvidia/cu1[0-9]"


def toolkit_environment(python: Path) -> dict[str, str]:
    """CUDA_HOME and PATH for an engine on a GPU that `python` runs, which it searches for
    compilers.

    CUDA_HOME is where pip put nvcc into the interpreter's environment: nothing looks there by
    itself, and the toolkit of the machine is often of another version. Whoever sets it chooses for
    himself; without nvcc in the environment it stays as it is. PATH begins with the programs of the
    environment, as if it were activated: ninja is one.
    """
    programs = Path(
        shutil.which(python) or python
    ).parent  # of a name alone, where it is found: not the working directory
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    if not any(os.environ.get(name) for name in CUDA_HOMES):
        homes = [home for home in sorted(programs.parent.glob(CUDA_WHEELS)) if (home / "bin" / "nvcc").is_file()]
        variables |= {"CUDA_HOME": str(homes[-1])} if homes else {}
    return variables
