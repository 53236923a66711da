"""Holders of one run that may be stopped before any call of the store and go on later: each in a
thread that moves one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlpipe.store.backend import Store
from tests.deadlines import DEADLINE_S


class Killed(BaseException):
    """The process dies here."""


class Memory:
    """What a store has, as a dictionary: each call is one moment."""

    parts_at_once = 1

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def exists(self, key: str) -> bool:
        return key in self.data

    def size(self, key: str) -> int:
        return len(self.read(key))

    def read(self, key: str) -> bytes:
        if key not in self.data:
            raise FileNotFoundError(key)
        return self.data[key]

    def read_part(self, key: str, start: int, end: int) -> bytes:
        return self.read(key)[start:end]

    def put(self, key: str, data: bytes) -> None:
        self.data[key] = bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        return self.data.setdefault(key, data) is data

    def list(self, prefix: str) -> list[str]:
        return [key for key in self.data if key.startswith(f"{prefix}/")]

    def folders(self, prefix: str) -> list[str]:
        names = (key.removeprefix(f"{prefix}/").partition("/") for key in self.list(prefix))
        return sorted({folder for folder, separator, _ in names if separator})

    def delete(self, key: str) -> None:
        if self.data.pop(key, None) is None:
            raise FileNotFoundError(key)

    def check_writable(self, key: str) -> None: ...


def store_of(objects: Any) -> Store:
    return Store("file:///nowhere", Path("/nowhere"), objects)


class Interrupted:
    """The objects of a store: after so many calls `event` happens.

    `late` is what the calls after it changed, but for leases.
    """

    parts_at_once = 1

    def __init__(self, memory: Memory, num_calls: int, event: Callable[[], object]) -> None:
        self._memory, self._left, self._event = memory, num_calls, event
        self.late: list[tuple[str, str]] = []

    @property
    def happened(self) -> bool:
        return self._left <= 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._memory, name)

        def counted(*arguments: Any) -> Any:
            is_late, result = self.happened, call(*arguments)
            if (
                is_late
                and name in ("put", "create", "delete")
                and result is not False
                and "/lease/" not in arguments[0]
            ):
                self.late.append((name, arguments[0]))
            self._left -= 1
            if self._left == 0:
                self._event()
            return result

        return counted


Order = list[tuple["Actor", str, str, bool]]


class Actor:
    """One process: `act` is given its store, and moves only by `step`."""

    def __init__(self, memory: Memory, act: Callable[[Store], object], order: Order) -> None:
        """`order`: of all processes, the calls in their order: whose, name,
        key, whether it changed something."""
        self.memory = memory
        self.fault: BaseException | None = None
        self._order = order
        self._changed = threading.Condition()
        self._pending: list[tuple[str, str]] = []
        self._waiting, self._permits, self._under_way, self._killed, self.done = 0, 0, 0, False, False
        self.store = store_of(self)
        self._thread = threading.Thread(target=self._work, args=(act,), daemon=True)
        self._thread.start()
        self._until_it_waits()

    def _work(self, act: Callable[[Store], object]) -> None:
        try:
            act(self.store)
        except BaseException as fault:
            self.fault = fault
        finally:
            with self._changed:
                self.done = True
                self._changed.notify_all()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.memory, name)
        if not callable(call):
            return call

        def one_moment(*arguments: Any) -> Any:
            with self._changed:
                self._waiting += 1
                self._pending.append((name, arguments[0]))
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._permits or self._killed)
                self._waiting -= 1
                self._pending.remove((name, arguments[0]))
                if self._killed:
                    raise Killed
                self._permits, self._under_way = self._permits - 1, self._under_way + 1
                try:
                    result = call(*arguments)
                    changed = name in ("put", "create", "delete") and result is not False
                    self._order.append((self, name, arguments[0], changed))
                    return result
                finally:
                    self._under_way -= 1
                    self._changed.notify_all()

        return one_moment

    def _until_it_waits(self) -> None:
        with self._changed:
            came = self._changed.wait_for(
                lambda: self.done or (self._waiting and not self._permits and not self._under_way), DEADLINE_S
            )
            assert came, "a holder waits for something else than its turn"

    @property
    def is_before_a_deed(self) -> bool:
        """Whether its next call is one that changes more than a file of an attempt."""
        return any(
            name in ("create", "delete") or (name == "put" and key.endswith(".json")) for name, key in self._pending
        )

    def step(self) -> None:
        """Its next call of the store, and all that it does until the one after."""
        with self._changed:
            if self.done:
                return
            self._permits = 1
            self._changed.notify_all()
        self._until_it_waits()

    def run(self) -> None:
        """All of the rest."""
        while not self.done:
            self.step()

    def kill(self) -> None:
        with self._changed:
            self._killed = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.done, DEADLINE_S), "a killed holder goes on"
