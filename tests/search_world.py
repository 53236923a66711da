"""A run to search over, and training in no time: iterations and evaluations as artifacts of a real
store, with made-up scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlpipe.base.manifests import BestReward, IterationRecord, Manifest
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.source import read_config
from rlpipe.extras.search.course import Course
from rlpipe.store.artifacts import commit, write_bytes
from rlpipe.store.backend import open_store
from rlpipe.store.documents import sealed
from rlpipe.store.limits import add_iteration, reason_to_stop, spent_before
from rlpipe.store.opening import create_or_continue, open_existing
from rlpipe.store.progress import Progress
from rlpipe.store.run import Run
from rlpipe.store.run_record import record_start
from tests.paths import PRESETS

AT, TOKENS, METRIC = 1, 100, "evaluation/words_pass_at_1"
MOMENT = "2026-11-30T05:06:07.000+00:00"
BEST_RATE = 3e-4


def searched_run(folder: Path, *sets: str) -> Run:
    """The run a with the iterations 0 and 1."""
    plain = ["sft.num_steps=0", f"rl.num_iterations={AT + 1}", "evaluation.every=0"]
    run = create_or_continue(read_config("tiny", ["run=a", f"store=file://{folder}/store", *plain, *sets], PRESETS))
    train(run.config)
    return run


def score_of(config: PipelineConfig) -> float:
    """Highest at BEST_RATE; a little higher with each iteration."""
    away = abs(math.log(config.rl.learning_rate / BEST_RATE))
    return round(0.8 - 0.1 * away + 0.001 * config.rl.num_iterations, 4)


def train(config: PipelineConfig) -> None:
    """What the flow `rl` leaves of a run: its iterations, up to its last or a budget, and the
    evaluation after the last."""
    run = replace(open_existing(open_store(config.store), config.run), config=config)
    record_start(run.store, config)
    while (done := Progress(run).num_done("rl")) < config.rl.num_iterations and not reason_to_stop(run, "rl", done):
        policy = _commit(run, done, "policy", {})
        seconds = {"time/iteration_s": 1.0, "rollout/num_tokens": TOKENS}
        metrics = seconds | add_iteration(spent_before(run, done), seconds, 0)
        if done + 1 == config.rl.num_iterations:
            _commit(run, done, "evaluation", {"words_pass_at_1": score_of(config)})
        best = BestReward(done, 0.5)
        record = IterationRecord(run.name, done, done + 1, {"policy": policy}, -1, metrics, [], best, MOMENT)
        assert run.store.create(run.iteration_key(done), sealed(record))


def commit_evaluation(run: Run, phase: str, unit: int, metrics: dict[str, float]) -> None:
    """Stores the evaluation of a policy."""
    _commit(run, unit, "evaluation", metrics, phase)


def _commit(run: Run, iteration: int, stage: str, metrics: dict[str, float], phase: str = "rl") -> ArtifactRef:
    folder = run.folder(phase, iteration, stage)
    record = write_bytes(run.store, folder, "a1", "data.bin", f"{run.name} {iteration}".encode())
    manifest = Manifest(
        run.name, phase, iteration, stage, {}, "0", {}, [record], metrics, iteration + 1, "x", MOMENT, MOMENT
    )
    return commit(run.store, folder, manifest)[0]


def play(course: Course, acts_max: int | None = None, order: Callable[[list[str]], Sequence[str]] = sorted) -> bool:
    """Trains a search to its end; False where it was killed before, after so many acts: the
    training of a candidate, its judgement, a decision."""
    acts = itertools.count()

    def is_killed() -> bool:
        return acts_max is not None and next(acts) >= acts_max

    while not course.is_done:
        for name in order(course.entrants()):
            config = course.begin(name)
            if config is not None:
                if is_killed():
                    return False
                train(config)
                if is_killed():
                    return False
                course.judge(name)
        if is_killed():
            return False
        course.decide()
    return True
