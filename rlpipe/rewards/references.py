"""The comparison of the reference answers of a data set by `math` and `deepscaler`: by value, as
text or not at all, counted before a run pays for samples.

Also the process that counts, as math-verify may hang on a text and takes seconds to import:
`python -m rlpipe.rewards.references`. First line in: {}. Then {"answers": [text]}, out: {"errors":
[why it cannot be read, "" where it is compared by value, null as text]}.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import closing

from rlpipe.processes.pool import WorkerPool
from rlpipe.processes.user_code import Loaded, Record, serve
from rlpipe.processes.worker import ProcessEnded

COMPARING = {"math", "deepscaler"}  # the rewards that read a reference so
ROWS_MAX = 1000  # of a data set, spread over it
ROWS_AT_ONCE = 20
TIME_S = 5.0  # for a data set; the text says how many were not read
SHOWN_CHARS = 40
NUMBER = re.compile(r"(?:.*####)?\s*-?\d[\d,]*(?:\.\d+)?\s*", re.DOTALL)  # compared by value: it is not asked about


def references_line(answers: Sequence[str | None]) -> str:
    """Text on the number of references that are compared as text and the number that cannot be
    scored; empty where all are compared by value.

    Reads at most ROWS_MAX, for at most TIME_S.
    """
    chosen = (
        [answers[index * len(answers) // ROWS_MAX] for index in range(ROWS_MAX)]
        if len(answers) > ROWS_MAX
        else [*answers]
    )
    others = [answer for answer in chosen if answer is None or not NUMBER.fullmatch(answer)]
    errors = _told(["" if answer is None else answer for answer in others]) if others else []
    as_text = [answer for answer, error in zip(others, errors, strict=False) if error is None]
    unread = [(answer, error) for answer, error in zip(others, errors, strict=False) if error]
    said = []
    if as_text:
        said.append(f"{len(as_text):,} are compared as text (the first: {_short(as_text[0])})")
    if unread:
        said.append(
            f"{len(unread):,} cannot be scored, reward_prompt (the first: {_short(unread[0][0])}: {unread[0][1]})"
        )
    num_looked = len(chosen) - len(others) + len(errors)
    if not said and len(errors) == len(others):
        return ""
    looked = (
        f"{num_looked:,} references"
        if num_looked == len(answers)
        else f"{num_looked:,} references looked at, of {len(answers):,}"
    )
    return f"of {looked}, {' and '.join(said) or 'all are compared by value'}"


def _told(answers: list[str]) -> list[str | None]:
    """The errors of the first answers, as many as there is time for. An error is the reason why an
    answer cannot be read; empty where it is compared by value, None where it is compared as
    text."""
    errors: list[str | None] = []
    with closing(WorkerPool("rl.rewards", "rlpipe.rewards.references", {})) as pool:
        pool.start()
        deadline_s = time.monotonic() + TIME_S
        while len(errors) < len(answers) and (left_s := deadline_s - time.monotonic()) > 0:
            request = {"answers": answers[len(errors) : len(errors) + ROWS_AT_ONCE]}
            try:
                answer = pool.ask(request, left_s)
            except (TimeoutError, ProcessEnded):
                break
            errors += answer["errors"]
    return errors


def _short(answer: str | None) -> str:
    return repr(answer if answer is None or len(answer) <= SHOWN_CHARS else f"...{answer[-SHOWN_CHARS:]}")


def load(_hello: Record) -> Loaded:
    from rlpipe.rewards.math_reward import read_reference  # imports sympy

    def error_of(answer: str) -> str | None:
        try:
            return None if read_reference(answer).values is None else ""
        except ValueError as error:
            return str(error)

    return {}, lambda request: {"errors": [error_of(answer) for answer in request["answers"]]}


if __name__ == "__main__":
    serve(load)
