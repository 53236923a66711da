"""What a person sees in Prefect and at the end: an iteration's metrics, some rollouts, the curve; the report."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

from prefect.artifacts import acreate_image_artifact, acreate_markdown_artifact, acreate_table_artifact

from rlpipe.report import before_after, draw_curves, reward_svg
from rlpipe.rollouts import BATCH, read_rows
from rlpipe.stages.session import Session
from rlpipe.types import ArtifactRef, JsonDict

ROLLOUTS_SHOWN = 8


async def publish_iteration(session: Session, record: JsonDict, batch: ArtifactRef) -> None:
    """Artifacts of the iteration's flow run: metrics, up to 8 rollouts, the reward so far."""
    name = f"{session.run.name.lower().replace('_', '-').replace('.', '-')}-{record['iteration']:05d}"
    rows = await asyncio.to_thread(_rollout_table, session, batch)
    lines = [f"| {metric} | {value:.6g} |" for metric, value in sorted(record["metrics"].items())]
    markdown = "\n".join(
        [f"# {session.run.name}, iteration {record['iteration']}", "", "| metric | value |", "|---|---|", *lines]
    )
    image = base64.b64encode(reward_svg(record["curve"]).encode()).decode()
    await asyncio.gather(
        acreate_markdown_artifact(markdown, key=f"{name}-metrics", description="Metrics of the iteration"),
        acreate_table_artifact(rows, key=f"{name}-rollouts", description="Some of the rollouts that were trained on"),
        acreate_image_artifact(f"data:image/svg+xml;base64,{image}", key=f"{name}-reward", description="Reward so far"),
    )


def _rollout_table(session: Session, batch: ArtifactRef) -> list[dict[str, object]]:
    rows = read_rows(session.run.store, batch, "batch.parquet", BATCH)[:ROLLOUTS_SHOWN]
    return [{name: row[name] for name in ("prompt", "completion", "reward", "advantage", "finish_reason")} for row in rows]


async def publish_report(session: Session, total: int) -> JsonDict:
    """Draws the curves of `total` committed iterations, tracks and registers their policy; returns where everything is."""
    run = session.run
    curve = Path.cwd() / f"{run.name}-curves.png"
    await asyncio.to_thread(draw_curves, run, total, curve)
    ref, manifest = run.policy(total)
    folder = run.store.address(f"{ref.folder}/{manifest.file('config.json').name.split('/')[0]}")
    session.tracker.finish(folder, [curve])
    return {"run": run.name, "policy": folder, "curves": str(curve), "before_after": before_after(run, total)}
