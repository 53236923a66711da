"""Text of others as people may see it.

On the standard library only: the package itself imports it, and so does the sandbox.
"""

from __future__ import annotations

import re

# what a terminal obeys, what turns the order of letters around, and what no encoding holds
_NOT_PRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text as it may be shown to a person, whoever wrote it: control characters but for line
    breaks and tabs, and lone surrogates, are escapes. Whatever shows text calls it: the terminal
    (`flows/printing.py`), logs (`rlpipe/__init__.py`), errors, Prefect, MLflow, the view.

    Example: printable("\x1b[2Jok") == "\\x1b[2Jok".
    """
    return _NOT_PRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)
