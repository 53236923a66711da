"""The curriculum in the stages: pass rates lie beside the batch of each iteration; the next one draws its prompts by them."""

from __future__ import annotations

import numpy as np

from rlpipe.data.curriculum import PassRate, PassRates, chance, draw, updated
from rlpipe.data.cursor import Draw, PromptCursor
from rlpipe.data.prompt import Prompt
from rlpipe.rollouts import PASS_RATES, read_rows_if_any
from rlpipe.stages.commit import Attempt
from rlpipe.stages.session import Session
from rlpipe.types import ArtifactRef, FileRecord, JsonDict, sha256_of

FILE = "pass_rates.parquet"


def read_pass_rates(session: Session, batch: ArtifactRef | None) -> PassRates:
    """The pass rates beside a batch; none where there is no batch yet, or it is of a run without a curriculum."""
    rows = read_rows_if_any(session.run.store, batch, FILE, PASS_RATES) if batch is not None else []
    return {row["prompt_id"]: PassRate(row["num_groups"], row["pass_rate"]) for row in rows}


def write_pass_rates(
    session: Session, attempt: Attempt, previous: ArtifactRef | None, groups: list[list[JsonDict]]
) -> tuple[list[FileRecord], JsonDict]:
    """The pass rates of `previous` with all finished groups of this iteration, kept or dropped, as a file; and metrics."""
    if session.config.rl.curriculum == "none":
        return [], {}
    threshold = session.config.evaluation.pass_threshold
    # a rollout that could not be scored says nothing of its prompt
    scored = [told for group in groups if (told := [row for row in group if not row["reward_fault"]])]
    shares = [(group[0]["prompt_id"], float(np.mean([row["reward"] >= threshold for row in group]))) for group in scored]
    rates = updated(read_pass_rates(session, previous), shares)
    rows = [
        {"prompt_id": name, "num_groups": known.num_groups, "pass_rate": known.pass_rate}
        for name, known in sorted(rates.items())
    ]
    return [attempt.write_rows(FILE, rows, PASS_RATES)], {"rollout/prompts_known": len(rates)}


def draw_prompts(
    session: Session, iteration: int, cursor: PromptCursor, position: JsonDict, count: int, previous: ArtifactRef | None
) -> tuple[list[Draw], JsonDict, JsonDict]:
    """`count` draws after `position`, the position after them, and what the curriculum skipped (nothing where there is none)."""
    rl, sets = session.config.rl, session.prompts("rl")
    if rl.curriculum == "none":
        return *cursor.take(position, count), {}
    rates = read_pass_rates(session, previous)

    def accept(found: Draw, place: int) -> bool:
        prompt: Prompt = sets[found[0]][found[1]]
        likely = chance(rates.get(prompt.prompt_id), rl.curriculum, rl.pass_rate_low, rl.pass_rate_high)
        return _uniform(session.config.seed, "curriculum", iteration, prompt.prompt_id, place) < likely

    return draw(cursor, position, count, accept)


def _uniform(*parts: object) -> float:
    """A number in [0, 1) from the parts: the same on any machine, and after any crash."""
    return int(sha256_of(list(parts))[:12], 16) / 2**48
