"""The errors that users may see."""

from __future__ import annotations

from rlpipe.base.printable import printable


class _Printable(Exception):
    """An error whose arguments are made printable, as people read its message."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class UserError(_Printable, ValueError):
    """Bad input: the message names the field, file or row, its value and the fix. Exit code 2."""


class PromptFault(ValueError):
    """A prompt cannot be scored, whatever its completion is: it has no answer or no tests, or they
    cannot be read. The fault `reward_prompt`.
    """


class StoreError(_Printable, RuntimeError):
    """The store refuses an operation, or is inconsistent (wrong hash, missing file, no access); the
    message names the file.
    """


class EngineError(_Printable, RuntimeError):
    """Raised when no engine could answer within its limits."""


class TrainerError(_Printable, RuntimeError):
    """The trainer could not do its job within its limits."""


class RunWaits(_Printable):
    """The run was released and continues later; not a failure."""


class StepRefused(TrainerError):
    """A step would damage the policy: it is not finite, or trains on rollouts of another policy.

    Nothing was committed.
    """
