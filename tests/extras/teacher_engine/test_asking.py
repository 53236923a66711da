"""The top tokens of a teacher on an engine: what becomes of them, and which are refused. What the
engines give is in tests/engines/test_client_contract.py."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlpipe.base.errors import UserError
from rlpipe.engines.client import RequestRefused, ScoredTokens
from rlpipe.extras.teacher_engine import asking
from rlpipe.extras.teacher_engine.asking import REST_MIN, ask
from rlpipe.records.columns import to_parquet, to_table
from rlpipe.records.rollout import BATCH, Rollout
from rlpipe.store.backend import open_store
from tests.rows import rollout
from tests.trainer_world import artifact, rollout_rows

CERTAIN = [(3, 0.0), (1, -20.0)]
EVEN = [(3, math.log(0.5)), (1, math.log(0.25))]


async def taught_by(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    places: list[list[tuple[int, float]]],
    top_k: int = 2,
    vocab: int = 9,
) -> list[asking.Taught]:
    """The records of one rollout of two tokens from an engine that gives this at its places."""

    async def score_top(tokens: list[int], num_scored: int, k: int) -> ScoredTokens:
        if k > 2:
            raise RequestRefused("too many")
        return ScoredTokens([-1.0] * num_scored, places)

    engine = SimpleNamespace(client=lambda *_: SimpleNamespace(url="http://a", score_top=score_top))
    monkeypatch.setattr(asking, "kind_of", lambda _: engine)
    row = rollout_rows(1, 1)[0] | {"completion_tokens": [3, 4], "loss_mask": [1, 1], "rollout_logprobs": [-1.0, -1.0]}
    store = open_store(f"file://{tmp_path}")
    table = to_table([rollout(row | {"rollout_index": 0})], Rollout, BATCH)
    return await ask(
        store, "local:http://a", artifact(store, "batch", {"batch.parquet": to_parquet(table)}), top_k, vocab
    )


async def test_the_rest_is_one_minus_the_sum_and_never_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [(own, top)] = await taught_by(tmp_path, monkeypatch, [EVEN, CERTAIN])
    assert top.tokens.tolist() == [3, 1, 3, 1] and own.logprobs.tolist() == [-1.0, -1.0]
    np.testing.assert_allclose(top.rest, [math.log(0.25), math.log(REST_MIN)], rtol=1e-6)
    [(_, whole)] = await taught_by(tmp_path, monkeypatch, [[(1, -0.5), (0, -1.0)]] * 2, top_k=5, vocab=2)
    assert np.isneginf(whole.rest).all(), "two tokens are all that there are"


@pytest.mark.parametrize(
    ("places", "top_k", "error"),
    [
        ([EVEN, EVEN[:1]], 2, r"rl\.teacher_top_k=2: the engine gives 1 top tokens"),
        ([EVEN, [(3, -0.5), (9, -1.0)]], 2, r"gives token 9, outside of the vocabulary of 9"),
        ([EVEN, [(3, math.nan), (1, -1.0)]], 2, r"gives 1 tokens of batch no finite logprob"),
        ([EVEN, EVEN], 3, r"rl\.teacher_engine: too many"),
    ],
)
async def test_top_tokens_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[list[tuple[int, float]]], top_k: int, error: str
) -> None:
    with pytest.raises(UserError, match=error):
        await taught_by(tmp_path, monkeypatch, places, top_k)
