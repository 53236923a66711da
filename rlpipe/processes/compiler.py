"""Checks that this machine can build the launchers of Triton's kernels: Triton compiles a small C
extension if it has none in its cache, even if all kernels are cached.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from rlpipe.base.errors import UserError

SEARCHED = ("CPATH", "C_INCLUDE_PATH")  # further places in which a C compiler looks for headers


def check_compiler(field: str) -> None:
    """Raises UserError naming `field` when there is no C compiler, or there are no headers of this
    Python, which training on GPUs needs.
    """
    named = os.environ.get("CC", "")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        missing = f"CC={named} is no program" if named else "no C compiler (gcc, clang)"
        raise UserError(
            f"{field}: {missing}, without which no kernel of Triton runs; apt-get install gcc, or name one in CC"
        )
    own = sysconfig.get_path("include")
    folders = [own, *(folder for name in SEARCHED for folder in os.environ.get(name, "").split(os.pathsep) if folder)]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        version = sysconfig.get_python_version()
        raise UserError(
            f"{field}: no Python.h in {own}, without which no kernel of Triton runs; apt-get install"
            f" python{version}-dev, or a Python that brings its headers"
        )
