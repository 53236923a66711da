"""The errors that a user may see."""

from __future__ import annotations

from rlpipe.base.printable import printable


def _said(args: tuple[object, ...]) -> list[object]:
    """The arguments of an error whose message people read."""
    return [printable(arg) if isinstance(arg, str) else arg for arg in args]


class UserError(ValueError):
    """Bad input: the message names the field, file or row, its value and the fix. Exit code 2."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class StoreError(RuntimeError):
    """The store refuses or contradicts itself (wrong hash, missing file, no access); the message
    names the file.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class EngineError(RuntimeError):
    """No engine could answer within its bounds."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class TrainerError(RuntimeError):
    """The trainer gang could not do its job within its bounds."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class RunWaits(Exception):
    """The run was given back and goes on later: no failure."""

    def __init__(self, *args: object) -> None:
        super().__init__(*_said(args))


class StepRefused(TrainerError):
    """A step that would spoil the policy: not finite, or trained on what another policy sampled.

    Nothing was committed.
    """
