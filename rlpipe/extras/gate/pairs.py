"""Two evaluations of the store as pairs: the same prompts, under the same settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlpipe.algorithms.answers import prompt_scores
from rlpipe.base.errors import UserError
from rlpipe.config.passing import passing_reward
from rlpipe.extras.gate.registry import champion
from rlpipe.records.rollout import SCORES, Group, Rollout, grouped
from rlpipe.report.curves import evaluation_of
from rlpipe.report.show import flat_settings
from rlpipe.store.artifacts import read_records
from rlpipe.store.opening import open_existing
from rlpipe.store.run import BEFORE_SFT, Run
from rlpipe.stored.remaking import committed_version

DIFFERENCES_SHOWN = 3
FAULTS = ("rl.faults", "rl.reward_fallback")  # of training: evaluations go by the cause, whatever these say


@dataclass(frozen=True)
class Evaluated:
    """The stored evaluation of a weight version of a run."""

    run: Run
    version: int

    def __str__(self) -> str:
        return f"{self.run.name}@{self.version}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its settings, flat; UserError where the version is not evaluated."""
        manifest = evaluation_of(self.run, self.version)
        if manifest is None:
            raise UserError(
                f"version {self.version} of run {self.run.name} is not evaluated; rlpipe evaluate {self.run.name}"
                f" --version {self.version}"
            )
        return flat_settings(manifest.settings)

    @cached_property
    def groups(self) -> list[Group]:
        """The rollouts of each prompt, the greedy one first, by prompt id."""
        ref, _ = self.run.committed(*self.run.policy_place(self.version), "evaluation")
        rollouts = read_records(self.run.store, ref, "evaluation.parquet", Rollout, SCORES)
        rollouts.sort(key=lambda rollout: (rollout.prompt_id, rollout.rollout_index))
        return grouped(rollouts)

    def groups_of(self, data: str) -> list[Group]:
        """Those of one data set."""
        return [group for group in self.groups if data_of(group) == data]

    def scores(self, data: str) -> dict[str, dict[str, float]]:
        """By metric the score of each prompt of a data set, as `prompt_scores`, but for rollouts
        that are left out for a fault.
        """
        config = self.run.owner(*self.run.policy_place(self.version), "evaluation").config
        rollouts = [
            rollout
            for group in self.groups_of(data)
            for rollout in group
            if not config.rl.says_nothing(rollout.reward_fault)
        ]
        scores = prompt_scores(rollouts, passing_reward(config, "evaluation"))
        return {metric: by_prompt for metric, by_prompt in scores.items() if not metric.startswith("maj_at_")}


def data_of(group: Group) -> str:
    """The name of the data set that a prompt is from."""
    return group[0].prompt_id.rpartition("/")[0]


def opponent(new: Evaluated, against: str) -> Evaluated:
    """The evaluation that a gate compares with. `against`: base, champion, run:NAME or
    run:NAME@VERSION.

    `base` is what RL starts from, and for that one the model before SFT. Without a champion it is
    `base`.
    """
    run, version = new.run, None
    if against == "champion":
        if (known := champion(run)) is None:
            return opponent(new, "base")
        return Evaluated(*known)
    if against == "base":
        if new.version == BEFORE_SFT or (new.version == 0 and not run.config.sft.num_segments):
            raise UserError(f"version {new.version} of run {run.name} is what training starts from: nothing is before")
        return Evaluated(run, BEFORE_SFT if new.version == 0 else 0)
    name, _, number = against.removeprefix("run:").partition("@")
    other = open_existing(run.store, name)
    version = committed_version(other, int(number) if number else None)
    return Evaluated(other, version)


def check_alike(old: Evaluated, new: Evaluated) -> None:
    """UserError with what differs, unless both were evaluated on the same prompts with the same
    settings, seed and rewards.
    """
    names = [name for name in sorted(old.settings | new.settings) if not name.startswith(FAULTS)]
    pairs = {name: (old.settings.get(name), new.settings.get(name)) for name in names}
    differ = [f"{name}: {before} and {after}" for name, (before, after) in pairs.items() if before != after]
    if not differ:
        prompts = [
            {group[0].prompt_id: group[0].prompt_tokens.tolist() for group in side.groups} for side in (old, new)
        ]
        other = [name for name in prompts[0] | prompts[1] if prompts[0].get(name) != prompts[1].get(name)]
        differ = [f"the prompt {name}" for name in other]
    if differ:
        rest = f" and {len(differ) - DIFFERENCES_SHOWN} more" if len(differ) > DIFFERENCES_SHOWN else ""
        raise UserError(
            f"{old} and {new} were evaluated differently ({'; '.join(differ[:DIFFERENCES_SHOWN])}{rest}): evaluate both"
            " on the same prompts with the same settings, in a fork for example"
        )
