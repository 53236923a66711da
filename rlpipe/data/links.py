"""A folder that others made holds its own files: a link in it may lead to any file of this machine,
a key for example.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from rlpipe.base.errors import UserError

# where the hub's cache keeps the files that the folders of its snapshots link to
BLOB = re.compile(r".*/(models|datasets)--[^/]+/blobs/[^/]+", re.DOTALL)


def check_links(where: str, folder: Path, paths: Iterable[Path]) -> None:
    """UserError, which `where` begins, naming the first of these paths below a folder that leads
    out of it, by whatever links on its way.

    The folder itself may be a link, and what the hub's cache downloaded is followed. Hard links are
    files like others: nobody can tell.
    """
    root = os.path.realpath(folder)
    for path in paths:
        target = os.path.realpath(path)
        if not (target.startswith(os.path.join(root, "")) or BLOB.fullmatch(target)):
            raise UserError(
                f"{where}: {path.relative_to(folder)} is a link to {target}, outside of that folder, and might be any"
                " file of this machine; put the file itself there"
            )
