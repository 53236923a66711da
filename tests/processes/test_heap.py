"""What is frozen is not looked through again; garbage from before and
after is collected all the same."""

from __future__ import annotations

import gc
import weakref

from rlpipe.processes.memory import settle_heap, settle_newer, settled_heap


class Ring:
    def __init__(self) -> None:
        self.me = self


def test_garbage_is_collected_before_and_after_and_what_was_frozen_once_it_is_asked_for_again() -> None:
    try:
        before, kept = weakref.ref(Ring()), Ring()
        settle_heap()
        assert before() is None and gc.get_freeze_count() > 1000
        after, of_kept = weakref.ref(Ring()), weakref.ref(kept)
        del kept
        gc.collect()
        assert after() is None and of_kept() is not None, "it was frozen"
        settle_heap()
        assert of_kept() is None
    finally:
        gc.freeze()  # as tests/conftest.py left it


def test_newer_garbage_is_collected_and_what_was_frozen_stays() -> None:
    try:
        kept = Ring()
        settle_heap()
        newer, of_kept = weakref.ref(Ring()), weakref.ref(kept)
        del kept
        settle_newer()
        assert newer() is None and of_kept() is not None
        settle_heap()
        assert of_kept() is None
    finally:
        gc.freeze()  # as tests/conftest.py left it


def test_behind_the_body_nothing_is_frozen() -> None:
    try:
        with settled_heap():
            assert gc.get_freeze_count() > 1000
            raise KeyError
    except KeyError:
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
