"""A rollout: a sampled completion of a prompt, then with its reward, then with its advantage.

Also the columns of the files in which rollouts are stored.

Legend of the shapes: P tokens of the prompt, L tokens of the completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypedDict, TypeVar, cast

import numpy as np

from rlpipe.records.kinds import (
    Float,
    Halves,
    Int32,
    Int64,
    Json,
    Logprobs,
    Mask,
    OptionalFloat,
    Spans,
    Text,
    Tokens,
    column_kinds,
)
from rlpipe.records.prompt import Message, Prompt

CUT_SHORT = "abort"  # the finish_reason of a completion that was aborted
TRUNCATED = "length"  # of one that reached the largest length
OUT_OF_TURNS = "turns"  # of one that has used all its turns, while its environment would continue
# prefixes of the reasons of faults that are not of a reward
WORLD_FAULTS = ("environment_", "agent_")
# marks a token without a recorded rollout logprob; no engine returns it, and nan would be a fault
UNRECORDED = float("inf")


@dataclass(frozen=True)
class EnvironmentOutcome:
    """The outcome of a rollout in an environment. Example: EnvironmentOutcome(1.0, 2, "",
    {"tool_calls": 1.0}, [...])."""

    reward: float
    num_turns: int
    fault: str  # empty without one
    metrics: dict[str, float] = field(default_factory=dict)
    # the environment's messages, turn by turn
    messages: list[list[Message]] = field(default_factory=list)

    def as_json(self) -> OutcomeFields:
        return cast("OutcomeFields", dict(vars(self)))


class OutcomeFields(TypedDict):
    """The fields of an EnvironmentOutcome that a reward gets."""

    reward: float
    num_turns: int
    fault: str
    metrics: dict[str, float]
    messages: list[list[Message]]


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion of a prompt. The stage `score` adds the reward, the stage `filter` the
    advantage.

    Example: Rollout("words/17", group_index=0, rollout_index=3, prompt="Spell sun",
    prompt_tokens=[5, 9], completion="nus", completion_tokens=[7, 2], loss_mask=[1, 1],
    rollout_logprobs=[-0.1, -2.3], weight_version=12, weight_versions=(Span(12, 2),),
    finish_reason="stop", seed=81, engine="engine-0").
    """

    prompt_id: Text
    group_index: Int32  # within the iteration
    rollout_index: Int32  # within the group
    prompt: Text  # the text of the prompt's last message
    prompt_tokens: Tokens  # [P]
    completion: Text
    completion_tokens: Tokens  # [L]
    loss_mask: Mask  # [L], 1 where a token is trained
    rollout_logprobs: Logprobs  # [L], of the temperature-scaled distribution
    weight_version: Int32  # of the last token
    weight_versions: Spans  # in order; the sum is L
    finish_reason: Text  # stop, length or abort; with an environment also turns and fault
    seed: Int64
    engine: Text
    environment: Annotated[EnvironmentOutcome | None, Json(sort_keys=True, record=EnvironmentOutcome)] = None
    reward: OptionalFloat = None  # None until it is scored
    reward_parts: Annotated[dict[str, float], Json(sort_keys=True)] = field(default_factory=dict)
    # the reason why it could not be scored; its reward is then the fallback
    reward_fault: Text = ""
    advantage: Float = 0.0

    @property
    def is_cut_short(self) -> bool:
        return self.finish_reason == CUT_SHORT

    def num_tokens_of(self, version: int) -> int:
        """The number of tokens that one weight version sampled."""
        return sum(span.num_tokens for span in self.weight_versions if span.version == version)

    def num_sampled_by(self, version: int) -> int:
        """The number of tokens that the policy of this version sampled, without those of the
        environment. Trap: only for the newest version of the rollout, as older tokens may be out of
        the loss mask.
        """
        if self.environment is None:
            return self.num_tokens_of(version)
        versions_L = np.repeat(
            [span.version for span in self.weight_versions], [span.num_tokens for span in self.weight_versions]
        )
        # the environment's tokens are not in the loss mask
        return int(np.count_nonzero(self.loss_mask[versions_L == version]))

    def continues_in(self, version: int) -> bool:
        """True when the rollout entered the iteration of this version as a partial one, with tokens
        of an older version.
        """
        return any(span.version < version for span in self.weight_versions)


@dataclass(frozen=True, eq=False, kw_only=True)
class CarriedRollout(Prompt):
    """A partial rollout for the next iteration, with its prompt: to be continued, or to be started
    again (no tokens).
    """

    group_index: Int32
    rollout_index: Int32
    completion_tokens: Tokens
    rollout_logprobs: Logprobs
    weight_versions: Spans
    finish_reason: Text
    seed: Int64
    engine: Text
    num_tokens_expired: Int32  # tokens that were too old to continue
    environment: Annotated[EnvironmentOutcome | None, Json(sort_keys=True, record=EnvironmentOutcome)] = None  # so far

    @property
    def as_prompt(self) -> Prompt:
        return Prompt(**{name: getattr(self, name) for name in PROMPTS})


@dataclass(frozen=True)
class PromptGroup:
    """One group of a sampling round: its prompt, and the rollouts that an earlier iteration
    began.
    """

    slot: int  # in the round
    group_index: int  # in the iteration
    prompt: Prompt
    carried: list[CarriedRollout] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Conversation:
    """A conversation of SFT as tokens [T]; the mask [T] is 1 on the assistant's tokens."""

    tokens: Tokens
    loss_mask: Mask


@dataclass(frozen=True, eq=False)
class Branch:
    """A further branch of an agent's conversation, beside the one that is its rollout.

    It is trained with `rl.branches = "all"`.
    """

    group_index: Int32
    rollout_index: Int32
    branch_index: Int32  # in the order of the branches' last replies
    prompt_tokens: Tokens  # [P]
    completion_tokens: Tokens  # [L]
    # [L], 1 where a token was sampled; if it is trained, only where no earlier row has the token
    loss_mask: Mask
    rollout_logprobs: Logprobs  # [L]
    finish_reason: Text  # of the last reply: stop or length


@dataclass(frozen=True, eq=False)
class TokenGaps:
    """The gaps between trainer and engine at the N scored tokens of a trained rollout (`loss_mask`
    1 in the batch), in order: the trainer's logprobs, by the weights that the iteration started
    from, minus rollout_logprobs. In nats; above 0 where the trainer's logprob is larger; nan where
    one of the two is unknown.
    """

    group_index: Int32
    rollout_index: Int32
    gap: Halves  # [N]


@dataclass(frozen=True, eq=False)
class TeacherLogprobs:
    """The logprobs that the teacher gives to the N scored tokens of a row that is trained: a
    rollout of the batch, or one of its branches, in the order of the batch.
    """

    group_index: Int32
    rollout_index: Int32
    logprobs: Logprobs  # [N]


@dataclass(frozen=True, eq=False)
class TeacherTop:
    """The K tokens that the teacher finds most probable at each of the N scored tokens of a row,
    position after position, and their logprobs. `rest`: the logprob of all other tokens together,
    -inf where the K are the whole vocabulary.
    """

    group_index: Int32
    rollout_index: Int32
    tokens: Tokens  # [N K]
    logprobs: Logprobs  # [N K]
    rest: Logprobs  # [N]


TEACHER_FILE = "teacher_logprobs.parquet"
TEACHER_TOP_FILE = "teacher_top.parquet"
BRANCHES_FILE = "branches.parquet"  # stored with their rollouts
Group = list[Rollout]


class HasPlace(Protocol):
    """A record with the index of a group, and an index within it."""

    @property
    def group_index(self) -> int: ...
    @property
    def rollout_index(self) -> int: ...


Placed = TypeVar("Placed", bound=HasPlace)
SCORE_COLUMNS = ["reward", "reward_parts", "reward_fault"]
BATCH = list(column_kinds(Rollout))
SCORES = [name for name in BATCH if name != "advantage"]
ROLLOUTS = [name for name in SCORES if name not in SCORE_COLUMNS]
PROMPTS = list(column_kinds(Prompt))


def grouped(rollouts: Iterable[Rollout]) -> list[Group]:
    """Groups rollouts by `group_index`, in the order of the groups' first rollouts."""
    groups: dict[int, Group] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_index, []).append(rollout)
    return list(groups.values())


def with_branches(rollouts: Sequence[Placed], branches: Iterable[Branch]) -> tuple[list[Placed | Branch], np.ndarray]:
    """Returns the rows of a batch that are trained: each rollout, directly followed by its
    branches.

    Also returns the index of the rollout of each row.
    """
    of_rollout: dict[tuple[int, int], list[Branch]] = {}
    for branch in branches:
        of_rollout.setdefault((branch.group_index, branch.rollout_index), []).append(branch)
    rows: list[Placed | Branch] = []
    places: list[int] = []
    for place, rollout in enumerate(rollouts):
        added = [rollout, *of_rollout.pop((rollout.group_index, rollout.rollout_index), [])]
        rows += added
        places += [place] * len(added)
    assert not of_rollout, f"branches of no rollout: {sorted(of_rollout)}"
    return rows, np.array(places, dtype=np.int64)


def is_finished(group: Group) -> bool:
    """True when no rollout of the group was cut short."""
    assert group, "a group has rollouts"
    return not any(rollout.is_cut_short for rollout in group)
