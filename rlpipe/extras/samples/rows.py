"""Stored rollouts of a run as rows for SFT: rejection sampling, expert iteration.

source = "run:a"
args = { best = 1, reward_min = 1.0 }
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from rlpipe.base.errors import UserError
from rlpipe.data.tokenizer_files import vocabulary_sha256
from rlpipe.records.prompt import Prompt, SampledTokens
from rlpipe.records.rollout import SCORES, Rollout
from rlpipe.store.artifacts import read_records
from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from rlpipe.store.policy_files import stored_policy
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run

UNLIMITED = 0


def chosen(
    *, run: str, store: str = "./rlpipe-store", best: int = UNLIMITED, reward_min: float | None = None,
    first: int = 0, last: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Conversations made of a run's rollouts: the prompt's messages and the completion. Those of
    several turns, of an environment or an agent, also have their tokens and masks as sampled.

    Of each prompt the `best` ones by reward (of equals the earlier; 0: all), each text once, with a
    reward of at least `reward_min`, sampled in the iterations from `first` to `last`. Without
    `last` the run must be complete: the same arguments must give the same rows. Prints how many
    were left out and why; UserError when none is left.
    """
    source = open_existing(open_store(store), run)
    vocabulary = _vocabulary(source) if source.config.rl.agent or source.config.rl.environment else ""
    by_prompt: dict[str, list[Rollout]] = defaultdict(list)
    prompts, left_out = dict[str, Prompt](), Counter[str]()
    for iteration in _iterations(source, first, last):
        for rollout in _rollouts(source, iteration, prompts):
            if reason := _reason(rollout, reward_min, by_prompt[rollout.prompt_id]):
                left_out[reason] += 1
            else:
                by_prompt[rollout.prompt_id].append(rollout)
    rows: list[dict[str, Any]] = []
    for prompt_id, rollouts in by_prompt.items():
        ranked = sorted(rollouts, key=lambda rollout: -(rollout.reward or 0.0))  # equal ones in the order of sampling
        kept = ranked[: best or None]
        left_out["not_best"] += len(ranked) - len(kept)
        rows += [_row(prompts[prompt_id], rollout, vocabulary) for rollout in kept]
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(left_out.items()) if count) or "none"
    print(f"run {run}: {len(rows)} rollouts of {len(by_prompt)} prompts are rows; left out: {counts}", flush=True)
    if not rows:
        raise UserError(f"run={run!r}: none of its rollouts is left ({counts}); lower reward_min, or name other ones")
    return rows


def _row(prompt: Prompt, rollout: Rollout, vocabulary: str) -> dict[str, Any]:
    """The messages; with a vocabulary also the tokens as sampled."""
    messages = [{"role": message["role"], "content": message.get("content", "")} for message in prompt.messages]
    row: dict[str, Any] = {"messages": [*messages, {"role": "assistant", "content": rollout.completion}]}
    if vocabulary:
        prompt_tokens = rollout.prompt_tokens.tolist()
        loss_mask = [0] * len(prompt_tokens) + rollout.loss_mask.tolist()
        tokens = prompt_tokens + rollout.completion_tokens.tolist()
        row["sampled"] = SampledTokens(tokens, loss_mask, vocabulary)._asdict()
    return row


def _vocabulary(run: Run) -> str:
    tokenizer, _ = run.committed("base", 0, "tokenizer")
    document = stored_policy(run.store, tokenizer).read("tokenizer.json")
    return vocabulary_sha256(Tokenizer.from_str(document.decode()))


def _iterations(run: Run, first: int, last: int | None) -> range:
    done = Progress(run).num_done("rl")
    if last is None and done < run.config.rl.num_iterations:
        raise UserError(
            f"run={run.name!r}: it has done {done} of {run.config.rl.num_iterations} iterations, and later rows would"
            f" change these; name the newest one to take, args = {{ last = {done - 1} }}"
        )
    end = done if last is None else last + 1
    if not 0 <= first < end <= done:
        raise UserError(f"run={run.name!r}: iterations {first} to {end - 1} are not all there; it has 0 to {done - 1}")
    return range(first, end)


def _rollouts(run: Run, iteration: int, prompts: dict[str, Prompt]) -> Iterator[Rollout]:
    """Yields the scored rollouts of an iteration, and adds its prompts."""
    record = run.iteration(iteration)
    assert record is not None, f"iteration {iteration} is committed"
    for number in range(record.last_round + 1):
        ref, _ = run.committed("rl", iteration, f"prompts/round-{number}")
        prompts |= {one.prompt_id: one for one in read_records(run.store, ref, "prompts.parquet", Prompt)}
        scores, _ = run.committed("rl", iteration, f"scores/round-{number}")
        yield from read_records(run.store, scores, "scores.parquet", Rollout, SCORES)


def _reason(rollout: Rollout, reward_min: float | None, others: list[Rollout]) -> str:
    """The reason why a rollout is no row; empty for one that is."""
    if rollout.reward is None or rollout.finish_reason != "stop":
        return "unfinished"
    if rollout.reward_fault:
        return "fault"
    if reward_min is not None and rollout.reward < reward_min:
        return "below_reward_min"
    return "repeated" if any(other.completion == rollout.completion for other in others) else ""
