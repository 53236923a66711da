"""What a stage tells the stages after it. Facts steer the program; other metrics only measure.

Both stand under `metrics` in the manifest, where older code wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from rlpipe.base.errors import StoreError
from rlpipe.store.documents import adapter_for


@dataclass(frozen=True)
class PromptsFacts:
    """The facts of the prompts of a sampling round.

    `first_group`: the index of its first group in the iteration. `cursor`: the position after it;
    None where nothing can be drawn. `data_sha256`: of the data that the position means.
    """

    num_prompts: int
    first_group: int
    cursor: Any
    data_sha256: str


@dataclass(frozen=True)
class BatchFacts:
    """The facts of a batch.

    `needs_more`: another sampling round follows. `num_kept`: groups that survived so far.
    """

    needs_more: bool
    num_kept: Annotated[int, Field(alias="rollout/groups_kept")]


Facts = TypeVar("Facts", PromptsFacts, BatchFacts)


def facts_of(metrics: Mapping[str, Any], kind: type[Facts], folder: str) -> Facts:
    """The facts among the metrics of the manifest in `folder`. StoreError when one is missing or
    malformed.
    """
    try:
        return adapter_for(kind).validate_python(metrics)
    except ValidationError as error:
        first = error.errors()[0]
        raise StoreError(f"the manifest in {folder} has no {first['loc'][0]} as it should ({first['msg']})") from error
