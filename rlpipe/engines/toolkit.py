"""Finds the compilers with which SGLang and vLLM build GPU kernels at their first request: nvcc and
ninja in the engines' own environment.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
# in pip's packages of CUDA 13 and newer
CUDA_WHEELS = "lib/python3.*/site-packages/nvidia/cu1[0-9]"


def toolkit_environment(python: Path) -> dict[str, str]:
    """The CUDA_HOME and PATH of an engine on a GPU that `python` runs.

    CUDA_HOME is the folder of pip's nvcc in the interpreter's environment, which is not searched by
    default; the machine's toolkit often has another version. It is unchanged if the user has set
    it, or if the environment has no nvcc. PATH begins with the programs of the environment (ninja
    is one), as if it were activated.
    """
    programs = Path(
        shutil.which(python) or python
    ).parent  # a bare name is resolved by PATH, not by the working directory
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    if not any(os.environ.get(name) for name in CUDA_HOMES):
        homes = [home for home in sorted(programs.parent.glob(CUDA_WHEELS)) if (home / "bin" / "nvcc").is_file()]
        variables |= {"CUDA_HOME": str(homes[-1])} if homes else {}
    return variables
