"""The folder of a run on this machine: logs, which stay, and copies of files in the store, which
are removed when the session ends.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.store import cache

COPIES = ("weights", "trainer", "tokenizer", "remaking", "source", cache.FOLDER)


def work_dir_of(config: PipelineConfig) -> Path:
    """Returns the folder of a run on this machine, for logs and local copies: `<run>-<store>` below
    `scratch`.
    """
    digest = hashlib.sha256(config.store.encode()).hexdigest()[:8]
    return config.scratch_folder / f"{config.run}-{digest}"


def remove_copies(work_dir: Path) -> None:
    """Removes the local copies, to free disk space.

    They are not trusted after a crash, and each can be made again from the store.
    """
    for name in COPIES:
        shutil.rmtree(work_dir / name, ignore_errors=True)
