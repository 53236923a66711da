"""The errors that a user may see."""

from __future__ import annotations

from typing import Any

from rlpipe.base.printable import printable


class _Said:
    """An error whose message people read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class UserError(_Said, ValueError):
    """Bad input: the message names the field, file or row, its value and the fix. Exit code 2."""


class StoreError(_Said, RuntimeError):
    """The store refuses or contradicts itself (wrong hash, missing file, no access); the message
    names the file.
    """


class EngineError(_Said, RuntimeError):
    """No engine could answer within its bounds."""


class TrainerError(_Said, RuntimeError):
    """The trainer gang could not do its job within its bounds."""


class RunWaits(_Said, Exception):
    """The run was given back and goes on later: no failure."""


class StepRefused(TrainerError):
    """A step that would spoil the policy: not finite, or trained on what another policy sampled.

    Nothing was committed.
    """
