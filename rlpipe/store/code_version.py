"""The code that works on a run, as its records name it: a commit, and a hash of the edits since."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rlpipe import __version__

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("rlpipe", "flows", "tasks")  # below ROOT: the code that runs
FILE_BYTES_MAX = 1 << 20  # of a file that are hashed, beside its size: no source file is longer
FILES_MAX = 2000  # whose content is hashed; further files count by name
GIT_TIMEOUT_S = 10
# another repository's, where git itself started us (a hook): -C would not go before them
FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE", "GIT_PREFIX")


@cache
def code_version() -> str:
    """The code as it is on the disk at the first call in this process.

    In a checkout the commit, `6a1f0c2b9d3e`. Where files of the code differ from it, are new (and
    not ignored) or deleted, `6a1f0c2b9d3e-dirty-1b2c3d4e`, which ends with a hash of them: the same
    edit of the same commit has the same name. Elsewhere (installed, copied, no git) the version of
    the package and a hash of all its files, `0.1.0-files-5f6a7b8c`.
    """
    return version_of(ROOT)


def version_of(root: Path) -> str:
    """`code_version` of the packages in a folder."""
    root = root.resolve()
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD").decode().strip()
        _git(root, "ls-files", "--error-unmatch", "rlpipe/__init__.py")  # else it only lies in somebody's checkout
        edited = _git(
            root, "diff", "HEAD", "--name-only", "--relative", "--no-renames", "--no-ext-diff", "-z", "--", *PACKAGES
        )
        added = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *PACKAGES)
    except (OSError, subprocess.SubprocessError):
        files = (
            path for package in PACKAGES for path in (root / package).rglob("*") if "__pycache__" not in path.parts
        )
        names = [os.fsencode(path.relative_to(root)) for path in files if path.is_file()]
        return f"{__version__}-files-{_digest(root, names)}"
    names = [name for name in (edited + added).split(b"\0") if name]
    return f"{commit}-dirty-{_digest(root, names)}" if names else commit


def _git(root: Path, *command: str) -> bytes:
    """The output of a git command in a folder.

    An error when there is no git, or when the folder is no checkout, or has no commit. A checkout
    that belongs to another user (a mounted one, in a container) is read too: its code runs already.
    """
    settings = (f"safe.directory={root}", "core.fsmonitor=false")
    options = [option for setting in settings for option in ("-c", setting)]
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN} | {
        "GIT_OPTIONAL_LOCKS": "0"
    }
    return subprocess.run(
        ["git", "-C", str(root), *options, *command],
        capture_output=True,
        timeout=GIT_TIMEOUT_S,
        check=True,
        env=environment,
    ).stdout


def _digest(root: Path, names: Iterable[bytes]) -> str:
    """A short sha256 of files by name and content; a deleted file counts by its name."""
    digest = hashlib.sha256()
    for index, name in enumerate(sorted(set(names))):
        digest.update(name + b"\0" + (_content(root / os.fsdecode(name)) if index < FILES_MAX else b"") + b"\0")
    return digest.hexdigest()[:8]


def _content(path: Path) -> bytes:
    """A sha256 of a file's size and its first FILE_BYTES_MAX bytes; empty where the file cannot be
    read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(FILE_BYTES_MAX)
            return hashlib.sha256(f"{os.fstat(file.fileno()).st_size}\0".encode() + head).digest()
    except OSError:
        return b""
