"""Makes text from others safe to show to people.

Imports only the standard library, as the package itself and the sandbox import it.
"""

from __future__ import annotations

import re

# control characters, characters that reverse the text direction, and lone surrogates
_NOT_PRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters (except line breaks and tabs) and lone surrogates escaped,
    safe to show to a person. To be called wherever text is shown: the terminal
    (`flows/printing.py`), logs (`rlpipe/__init__.py`), errors, Prefect, MLflow, the view.

    Example: printable("\x1b[2Jok") == "\\x1b[2Jok".
    """
    return _NOT_PRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)
