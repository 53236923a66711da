"""Facts are read from manifests as stages write them; what is missing or malformed is named."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.base.errors import StoreError
from rlpipe.store.facts import BatchFacts, PromptsFacts, facts_of

BATCH: dict[str, Any] = {"needs_more": True, "rollout/groups_kept": 3, "rollout/rounds": 1}
PROMPTS: dict[str, Any] = {"num_prompts": 4, "first_group": 2, "cursor": {"drawn": 6}, "data_sha256": "ab"}


def test_facts_are_found_among_metrics() -> None:
    batch = facts_of(BATCH, BatchFacts, "rl/batch")
    assert (batch.needs_more, batch.num_kept) == (True, 3)
    prompts = facts_of(PROMPTS, PromptsFacts, "rl/prompts")
    assert (prompts.num_prompts, prompts.first_group, prompts.cursor, prompts.data_sha256) == (4, 2, {"drawn": 6}, "ab")
    assert facts_of(PROMPTS | {"cursor": None}, PromptsFacts, "rl/prompts").cursor is None  # an import of foreign files


@pytest.mark.parametrize("name", [*PROMPTS])
def test_a_missing_fact_is_named(name: str) -> None:
    with pytest.raises(StoreError, match=f"rl/prompts has no {name} as"):
        facts_of({key: value for key, value in PROMPTS.items() if key != name}, PromptsFacts, "rl/prompts")


@pytest.mark.parametrize("broken", [{"needs_more": "perhaps"}, {"rollout/groups_kept": 1.5}, {"needs_more": None}])
def test_a_malformed_fact_is_named(broken: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match=f"rl/batch has no {next(iter(broken))} as"):
        facts_of(BATCH | broken, BatchFacts, "rl/batch")
