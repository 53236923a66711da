"""Checks that a folder made by others holds its own files: a link in it may point to any file of
this machine, for example a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from rlpipe.base.errors import UserError

# the folder in which the hub's cache keeps the files that its snapshots link to
BLOB = re.compile(r".*/(models|datasets)--[^/]+/blobs/[^/]+", re.DOTALL)


def check_links(where: str, folder: Path, paths: Iterable[Path]) -> None:
    """Raises UserError, with the prefix `where`, naming the first of these paths below a folder
    that leads out of it by any links.

    The folder itself may be a link, and links of the hub's cache are allowed. Hard links cannot be
    told from other files.
    """
    root = os.path.realpath(folder)
    for path in paths:
        target = os.path.realpath(path)
        if not (target.startswith(os.path.join(root, "")) or BLOB.fullmatch(target)):
            raise UserError(
                f"{where}: {path.relative_to(folder)} is a link to {target}, outside of that folder, and might be any"
                " file of this machine; put the file itself there"
            )
