"""SGLang's server with its keys from the environment.

A script for the interpreter that has SGLang; imports nothing of rlpipe.

SGLang takes keys only as arguments, which every user of the machine can read, and logs its
arguments.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from typing import Any

KEYS = {"--api-key": "RLPIPE_API_KEY", "--admin-api-key": "RLPIPE_ADMIN_API_KEY"}


def main() -> None:
    """Serves until the process ends."""
    del sys.path[0]  # removes this folder, whose modules have common names
    keys = {option: os.environ[name] for option, name in KEYS.items()}
    plain = logging.getLogRecordFactory()

    def without_keys(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = plain(*args, **kwargs)
        for key in filter(None, keys.values()):
            record.msg = str(record.msg).replace(key, "***")
        return record

    logging.setLogRecordFactory(without_keys)
    sys.argv += [part for pair in keys.items() for part in pair]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
