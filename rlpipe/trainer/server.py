"""The command of a trainer process: `python -m rlpipe.trainer.server OPTIONS` (`serving.py`)."""

from __future__ import annotations

import sys

from rlpipe.processes.launch import die_with_parent
from rlpipe.processes.memory import lasting_objects
from rlpipe.trainer.held import wait_until_freed


def main(argument: str) -> None:
    """Works as a rank of the trainer, once it may, until the parent ends."""
    die_with_parent()
    with lasting_objects():
        from rlpipe.trainer.serving import work
    wait_until_freed()
    work(argument)


if __name__ == "__main__":
    main(sys.argv[1])
