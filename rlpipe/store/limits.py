"""Budgets and stop rules: when a run ends before its last iteration, and why.

All counts are of committed results, so a resume counts what was spent before, and every caller gets
the same answer. Results of an attempt that died before its commit do not count. An iteration's
record holds the counts of the run up to it: to read them costs one request at iteration 1,000 as at
iteration 10. A fork counts its own iterations, not its parent's.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.base.manifests import BestReward, IterationRecord, moment_of
from rlpipe.base.values import Metrics
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.store.run import Run

SECONDS, TOKENS, GPU_SECONDS, COST = "spent/wall_clock_s", "spent/rollout_tokens", "spent/gpu_s", "spent/cost"
UNTRAINED = "train/iterations_untrained"  # of a run's own iterations so far
HOUR_S = 3600.0


def gpus_held(config: PipelineConfig, phase: str) -> int:
    """The number of GPUs that a phase ("sft" or "rl") holds while it runs: the trainer's, and
    during RL the engines' own, which stay up between stages.
    """
    trainer = config.trainer.nodes * len(config.trainer.gpu_ids)
    engines = config.engines.nodes * len(config.engines.gpu_ids)
    own = phase == "rl" and config.samples and not config.engines.colocate
    return trainer + (engines if own else 0)


def spent_on_sft(run: Run, segments: int) -> Metrics:
    """The seconds, tokens and GPU seconds that the first `segments` committed segments cost a run.

    All are 0 when the segments are a parent's.
    """
    seconds = 0.0
    for segment in range(segments if run.parent is None else 0):
        manifest = run.committed("sft", segment, "policy")[1]
        began, ended = (
            moment_of(text, f"SFT segment {segment} of run {run.name}")
            for text in (manifest.started_at, manifest.ended_at)
        )
        seconds += (ended - began).total_seconds()
    seconds = max(seconds, 0.0)  # a clock may be set back
    return {SECONDS: round(seconds, 3), TOKENS: 0, GPU_SECONDS: round(seconds * gpus_held(run.config, "sft"), 3)}


def spent_before(run: Run, iteration: int) -> Metrics:
    """The totals that the run spent before an RL iteration, by the record of the previous one."""
    previous = own_record(run, iteration - 1)
    if previous is None:
        return spent_on_sft(run, run.sft_result()[1])
    return {name: previous.metrics.get(name, 0) for name in (SECONDS, TOKENS, GPU_SECONDS)}


def add_iteration(before: Metrics, metrics: Metrics, gpus: int) -> Metrics:
    """The totals after an iteration with these metrics, on `gpus` GPUs.

    The evaluation of the policy that RL starts from is not included.
    """
    seconds = metrics["time/iteration_s"]
    return {
        SECONDS: round(before[SECONDS] + seconds, 3),
        TOKENS: before[TOKENS] + metrics["rollout/num_tokens"],
        GPU_SECONDS: round(before[GPU_SECONDS] + seconds * gpus, 3),
    }


def cost(config: PipelineConfig, spent: Metrics) -> Metrics:
    """The price of all GPU hours in `spent`, by the config of this start; empty without a price."""
    price = config.budget.price_per_gpu_h
    return {COST: round(spent[GPU_SECONDS] / HOUR_S * price, 6)} if price else {}


def best_so_far(previous: IterationRecord | None, iteration: int, reward: float) -> BestReward:
    """The best mean reward up to an iteration, and its iteration.

    `previous`: the record of the previous iteration. An equal reward is not better.
    """
    return previous.best if previous and previous.best.reward >= reward else BestReward(iteration, reward)


@dataclass(frozen=True)
class Untrained:
    """The number of a run's own iterations in which no token was trained, and the number of all its
    own.
    """

    num: int
    of: int

    @property
    def is_all(self) -> bool:
        """True when the policy is still the one that the run started from."""
        return 0 < self.num == self.of

    def __str__(self) -> str:
        return f"nothing was trained in {self.num} of {self.of} iterations"


def untrained(run: Run, newest: IterationRecord | None) -> Untrained:
    """The count by the newest record; iterations of older versions, which do not say, count as
    trained.
    """
    own = newest.iteration - run.fork_at if newest else 0
    return Untrained(int(newest.metrics.get(UNTRAINED, 0)) if newest and own > 0 else 0, max(own, 0))


def add_untrained(run: Run, iteration: int, num_tokens: float) -> Metrics:
    """The count after an iteration that trained `num_tokens` tokens."""
    before = own_record(run, iteration - 1)
    return {UNTRAINED: (before.metrics.get(UNTRAINED, 0) if before else 0) + (not num_tokens)}


def own_record(run: Run, iteration: int) -> IterationRecord | None:
    """The record of an iteration that this run committed itself; None before its first one (a fork
    counts from there).
    """
    if iteration < 0 or run.owner("rl", iteration) is not run:
        return None
    return run.iteration(iteration)


def reason_to_stop(run: Run, phase: str, done: int) -> str:
    """The reason why a run does not go on after `done` committed segments ("sft") or iterations
    ("rl"); empty when it goes on, or is complete.

    It depends on the store and the config only, so it is the same for every caller.
    """
    sft, rl = run.config.sft, run.config.rl
    total, unit = (sft.num_segments, "SFT segments") if phase == "sft" else (rl.num_iterations, "iterations")
    if done >= total:
        return ""
    reason = over_budget(run.config, spent_on_sft(run, done) if phase == "sft" else spent_before(run, done))
    if not reason and phase == "rl" and (record := own_record(run, done - 1)):
        reason = broken_rule(run.config, record)
    return f"{reason} {done} of {total} {unit} are committed" if reason else ""


def over_budget(config: PipelineConfig, spent: Metrics) -> str:
    """The first budget that is used up, and what to do; empty when none is."""
    budget, price = config.budget, config.budget.price_per_gpu_h
    for name, limit, used, unit in (
        ("wall_clock_h", budget.wall_clock_h, spent[SECONDS] / HOUR_S, "h"),
        ("rollout_tokens", budget.rollout_tokens, spent[TOKENS], "tokens"),
        ("gpu_h", budget.gpu_h, spent[GPU_SECONDS] / HOUR_S, "GPU hours"),
        ("cost", budget.cost, cost(config, spent).get(COST, 0.0), f"at {price:g} a GPU hour"),
    ):
        if limit and used >= limit:
            return f"budget.{name}={limit:g} is spent ({used:.6g} {unit}); raise it and start the run again."
    return ""


def broken_rule(config: PipelineConfig, record: IterationRecord) -> str:
    """The first stop rule that the newest iteration breaks, and what to do; empty when it breaks
    none.
    """
    stop, rl, metrics, iteration, best = config.stop, config.rl, record.metrics, record.iteration, record.best
    since = iteration - best.iteration
    stops = rl.on_mismatch == "stop" and rl.mismatch_counts(metrics.get("rollout/num_tokens_stale", 0.0))
    if stop.reward_plateau and since >= stop.reward_plateau:
        return (
            f"stop.reward_plateau={stop.reward_plateau}: no mean reward above {best.reward:.4g} of iteration"
            f" {best.iteration} in {since} iterations; raise it, or set it to 0, and start the run again."
        )
    for name, limit, metric in (
        ("stop.kl_max", stop.kl_max, "train/kl"),
        ("stop.proximal_kl_max", stop.proximal_kl_max, "train/proximal_kl"),
        ("rl.mismatch_max", rl.mismatch_max if stops else 0.0, "train/mismatch_abs_mean"),
    ):
        if limit and metrics.get(metric, 0.0) > limit:
            return (
                f"{name}={limit:g}: {metric} is {metrics[metric]:.4g} in iteration {iteration}; look at what the policy"
                f" does (rlpipe show {config.run} --iteration {iteration}), then raise the bound and start the run"
                " again, or fork it before."
            )
    return ""
