"""The folder of a run on this machine: logs, which stay, and copies of what is in the store, which
go when the session ends.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from rlpipe.config.pipeline import PipelineConfig

COPIES = ("weights", "trainer", "tokenizer", "remaking", "source")


def work_dir_of(config: PipelineConfig) -> Path:
    """Logs and local copies of a run on this machine: `<run>-<store>` below `scratch`."""
    digest = hashlib.sha256(config.store.encode()).hexdigest()[:8]
    return config.scratch_folder / f"{config.run}-{digest}"


def remove_copies(work_dir: Path) -> None:
    """Frees what the copies take on the disk.

    They are not trusted after a crash, and all of them can be made again from the store.
    """
    for name in COPIES:
        shutil.rmtree(work_dir / name, ignore_errors=True)
