"""The errors that users may see."""

from __future__ import annotations

from rlpipe.base.printable import printable


def _said(args: tuple[object, ...]) -> list[object]:
    """Makes the arguments of an error printable, as people read its message."""
    return [printable(arg) if isinstance(arg, str) else arg for arg in args]


class UserError(ValueError):
    """Bad input: the message names the field, file or row, its value and the fix. Exit code 2."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class PromptFault(ValueError):
    """A prompt cannot be scored, whatever its completion is: it has no answer or no tests, or they
    cannot be read. The fault `reward_prompt`.
    """


class StoreError(RuntimeError):
    """The store refuses an operation, or is inconsistent (wrong hash, missing file, no access); the
    message names the file.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class EngineError(RuntimeError):
    """Raised when no engine could answer within its limits."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class TrainerError(RuntimeError):
    """The trainer could not do its job within its limits."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class RunWaits(Exception):
    """The run was released and continues later; not a failure."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class StepRefused(TrainerError):
    """A step would damage the policy: it is not finite, or trains on rollouts of another policy.

    Nothing was committed.
    """
