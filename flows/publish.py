"""What a person sees in Prefect and at the end: an iteration's metrics, some rollouts, the curve; the report."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from flows.progress import iteration_line
from rlpipe.report import before_after, draw_curves, reward_svg
from rlpipe.rollouts import BATCH, read_rows
from rlpipe.stages.session import Session
from rlpipe.types import ArtifactRef, JsonDict

ROLLOUTS_SHOWN = 8


async def publish_iteration(session: Session, record: JsonDict, batch: ArtifactRef) -> None:
    """Artifacts of the iteration's flow run: the reward so far and all metrics, and up to 8 rollouts."""
    name = f"{_key(session)}-{record['iteration']:05d}"
    rows = await asyncio.to_thread(_rollout_table, session, batch)
    metrics = [f"| {metric} | {value:.6g} |" for metric, value in sorted(record["metrics"].items())]
    curve = _image("svg+xml", reward_svg(record["curve"]).encode())
    markdown = [f"# {session.run.name}, iteration {record['iteration']}", "", curve, "", *_preformatted([iteration_line(record)]),
                "| metric | value |", "|---|---|", *metrics]  # fmt: skip
    await asyncio.gather(
        acreate_markdown_artifact(
            "\n".join(markdown), key=f"{name}-metrics", description="Reward so far, metrics of the iteration"
        ),
        acreate_table_artifact(rows, key=f"{name}-rollouts", description="Some of the rollouts that were trained on"),
    )


def _rollout_table(session: Session, batch: ArtifactRef) -> list[dict[str, object]]:
    """Rollouts from all over the batch; the short columns come first, for texts can be wider than the page."""
    rows = read_rows(session.run.store, batch, "batch.parquet", BATCH)
    rows = rows[:: max(1, len(rows) // ROLLOUTS_SHOWN)][:ROLLOUTS_SHOWN]
    shown = ("reward", "advantage", "finish_reason", "completion", "prompt")
    return [{name: round(row[name], 4) if isinstance(row[name], float) else row[name] for name in shown} for row in rows]


async def publish_report(session: Session, total: int) -> JsonDict:
    """Draws the curves of `total` committed iterations, tracks and registers their policy; returns where everything is."""
    run = session.run
    curve = Path.cwd() / f"{run.name}-curves.png"
    await asyncio.to_thread(draw_curves, run, total, curve)
    ref, manifest = run.policy(total)
    folder = run.store.address(f"{ref.folder}/{manifest.file('config.json').name.split('/')[0]}")
    session.tracker.finish(folder, [curve])
    compared = before_after(run, total)
    markdown = [f"# {run.name}, {total} iterations", "", f"The policy: `{folder}`", "", *_preformatted(compared),
                _image("png", curve.read_bytes())]  # fmt: skip
    await acreate_markdown_artifact(
        "\n".join(markdown), key=f"{_key(session)}-report", description="Before and after RL, curves"
    )
    return {"run": run.name, "policy": folder, "curves": str(curve), "before_after": compared}


def _key(session: Session) -> str:
    """The run's name as Prefect takes it in keys of artifacts."""
    return session.run.name.lower().replace("_", "-").replace(".", "-")


def _preformatted(lines: list[str]) -> list[str]:
    return ["```text", *lines, "```", ""] if lines else []


def _image(kind: str, data: bytes) -> str:
    """An image inside markdown: an artifact of type image shows its whole address beside itself."""
    return f"![curves](data:image/{kind};base64,{base64.b64encode(data).decode()})"
