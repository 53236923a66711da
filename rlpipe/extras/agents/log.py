"""The replies to the agents of a shard in progress: stored before they are given, so that a process
that takes over gives them again.

A stored reply whose agent ended before it was given gets a second line, without completions: it is
deleted in effect. The replies lie beside the shard, in `calls/<attempt>/<number>.jsonl`: replies
that are stored at the same time are one file. No manifest names them; `rlpipe gc` deletes them once
the shard is committed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TypedDict

from rlpipe.base.errors import StoreError
from rlpipe.engines.client import Completion, logprobs_of, tokens_of
from rlpipe.extras.agents.rollout import CallKey, Replies
from rlpipe.store.artifacts import new_attempt
from rlpipe.store.audit import CALLS
from rlpipe.store.backend import Store

Place = tuple[int, int]  # of a rollout in its shard: its group and its index there


@dataclass(eq=False)
class _Line:
    """One call that waits to be written."""

    text: str
    is_kept: bool = False


class KeptCompletion(TypedDict):
    """A completion in a line of the log."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    spans: list[tuple[int, int]]
    engine: str


class CallLog:
    """The log of one shard."""

    def __init__(self, store: Store, folder: str) -> None:
        """`folder`: the shard's.

        Reads the replies that earlier processes have stored there; StoreError when that fails.
        """
        self.replies: defaultdict[Place, Replies] = defaultdict(dict)
        self._store = store
        self._folder = f"{folder}/{CALLS}"
        self._attempt = new_attempt()
        self._num_files = 0
        self._waiting: list[_Line] = []
        self._writing = asyncio.Lock()
        num_kept: Counter[tuple[Place, CallKey]] = Counter()  # files have no order
        for key in store.list(self._folder):
            for line in store.read(key).splitlines():
                place, call, completions = _read(store.address(key), line)
                num_kept[place, call] += 1 if completions else -1
                if completions:
                    self.replies[place].setdefault(call, completions)
        for (place, call), number in num_kept.items():
            if number <= 0:
                self.replies[place].pop(call, None)

    async def keep(self, place: Place, call: CallKey, completions: list[Completion]) -> None:
        """Returns when the replies to a call are in the store; replies that wait at the same time
        are written together. Without completions, the stored replies to the call are forgotten.
        """
        line = _Line(
            json.dumps({"rollout": place, "call": call, "completions": [_as_json(sampled) for sampled in completions]})
        )
        self._waiting.append(line)
        async with self._writing:
            if line.is_kept:  # the previous holder of the lock has written it too
                return
            lines = [*self._waiting]
            key, self._num_files = f"{self._folder}/{self._attempt}/{self._num_files:06d}.jsonl", self._num_files + 1
            try:
                await asyncio.to_thread(self._store.put, key, "".join(f"{line.text}\n" for line in lines).encode())
                for written in lines:
                    written.is_kept = True
            finally:  # unwritten lines wait for the next call, except the line of this one
                self._waiting = [other for other in self._waiting if not (other.is_kept or other is line)]


def _as_json(completion: Completion) -> KeptCompletion:
    return {
        "tokens": completion.tokens.tolist(),
        "logprobs": completion.rollout_logprobs.tolist(),
        "finish_reason": completion.finish_reason,
        "spans": completion.spans,
        "engine": completion.engine,
    }


def _read(address: str, line: bytes) -> tuple[Place, CallKey, list[Completion]]:
    try:
        entry = json.loads(line)
        group, index = entry["rollout"]
        completions = [
            Completion(
                tokens_of(sampled["tokens"]),
                logprobs_of(sampled["logprobs"]),
                sampled["finish_reason"],
                [(version, num_tokens) for version, num_tokens in sampled["spans"]],
                sampled["engine"],
            )
            for sampled in entry["completions"]
        ]
        return (group, index), CallKey(*entry["call"]), completions
    except (ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"{address} is damaged: a line is no call ({error!r}); delete this file, and its calls are sampled again"
        ) from error
