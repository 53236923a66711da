"""SFT and RL of language models as a workflow that loses nothing."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from rlpipe.base.printable import printable

__version__ = "0.1.0"
_record = logging.getLogRecordFactory()


def _printable_record(*args: Any, **named: Any) -> logging.LogRecord:
    """A record of any logger of the process, Prefect's and MLflow's too: what it says of others'
    text may be shown, wherever it goes.
    """
    record = _record(*args, **named)
    # arguments that do not fit: whoever writes the record says so
    with contextlib.suppress(Exception):
        said = record.getMessage()
        if printable(said) != said:
            record.msg, record.args = printable(said), ()
    if record.exc_info and record.exc_info[0]:
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info))  # what formatters take
    return record


logging.setLogRecordFactory(_printable_record)
