"""The model card of an exported policy: its base, its data and rewards, how good it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from rlpipe.algorithms.answers import STDERR
from rlpipe.config.passing import passing_reward
from rlpipe.config.pipeline import identity
from rlpipe.config.secrecy import without_passwords
from rlpipe.store.forks import forked_from
from rlpipe.store.run import Run

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NAME = "README.md"  # where the hub and its tools look for it


def write_card(run: Run, version: int, folder: Path) -> None:
    """Writes the model card of a weight version into its exported folder."""
    (folder / NAME).write_text("\n".join(card_lines(run, version)) + "\n")


def card_lines(run: Run, version: int) -> Iterator[str]:
    """The lines of the card, in Markdown with the hub's front matter."""
    config, (policy, manifest) = run.config, run.policy(version)
    base = config.model.path
    licence = base_licence(base)
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [rlpipe]")
    yield from [f"base_model: {base}"] if HUB_NAME.fullmatch(base) and not Path(base).exists() else []
    yield from [f"license: {json.dumps(licence)}"] if licence else []
    yield from ("---", "", f"# {run.name}, weight version {version}", "")
    yield f"Base: {f'`{base}`' if base else 'a new model with random weights'}. Licence of the base: " + (
        f"{licence}." if licence else "not known here; ask whoever made it." if base else "none, it has no base."
    )
    yield from ("", "## Data", "", "| set | use | source | sha256 |", "|---|---|---|---|")
    digests = _digests(run)
    for data in config.data:
        source = without_passwords(data.source).replace("|", "\\|")
        yield f"| {data.name} | {data.use} | `{source}` | {digests.get((data.use, data.name), 'see the evaluation')} |"
    yield from ("", "## Rewards", "", "| reward | weight |", "|---|---|")
    yield from (f"| `{name}` | {weight:g} |" for name, weight in config.rewards("rl").items())
    yield from _evaluation(run, version)
    yield from ("", "## Settings", "", "```json", json.dumps(identity(config), indent=1), "```")
    yield from ("", "## Lineage", "")
    yield f"- run `{manifest.run}`, {manifest.phase} {manifest.iteration}, stage {manifest.stage}, {manifest.ended_at}"
    yield from [f"- a fork of {forked_from(run)}"] if run.parent else []
    yield f"- rlpipe {manifest.code_version}; manifest sha256 `{policy.sha256}`"
    yield from (f"- made from {name}: manifest sha256 `{sha256}`" for name, sha256 in manifest.inputs.items())
    yield from (f"- `{file.plain_name}` as stored: sha256 `{file.sha256}`" for file in manifest.files)


def base_licence(base: str) -> str:
    """The licence that the base model's own card names; empty where it has no card on this
    machine.
    """
    path = Path(base).expanduser() / NAME
    if not base or not path.is_file():
        return ""
    text = path.read_text(errors="replace")
    head = text.split("\n---", 1)[0].splitlines() if text.startswith("---\n") else []
    return next((line.partition(":")[2].strip().strip("\"'") for line in head if line.startswith("license:")), "")


def _digests(run: Run) -> dict[tuple[str, str], str]:
    """The sha256 of the rows of data sets, as they were read, by use and name; those of prompts are
    of all sets together.
    """
    digests: dict[tuple[str, str], str] = {}
    if run.artifact("data", 0, "data"):
        sets = run.committed("data", 0, "data")[1].metrics.get("sets", {})
        digests |= {("sft", name): f"`{facts['sha256']}`, {facts['rows']} rows" for name, facts in sets.items()}
    if run.artifact("rl", 0, "prompts/round-0"):
        whole = run.committed("rl", 0, "prompts/round-0")[1].metrics.get("data_sha256")
        digests |= {("rl", data.name): f"`{whole}` of all sets of this use" for data in run.config.sets("rl") if whole}
    return digests


def _evaluation(run: Run, version: int) -> Iterator[str]:
    """The metrics of the evaluation of a policy, with their standard errors."""
    yield from ("", "## Evaluation", "")
    place = run.policy_place(version)
    if not run.artifact(*place, "evaluation"):
        yield f"Not evaluated: `rlpipe evaluate {run.name} --version {version}` does it."
        return
    ref, manifest = run.committed(*place, "evaluation")
    threshold = passing_reward(run.config, "evaluation")
    yield f"On held-out prompts, over which the standard error is. A reward of {threshold:g} or more passes."
    yield f"Manifest of the evaluation, with its prompts: sha256 `{ref.sha256}`."
    yield from ("", "| metric | value | standard error |", "|---|---|---|")
    metrics = {name: value for name, value in manifest.metrics.items() if isinstance(value, int | float)}
    for name in sorted(name for name in metrics if not name.endswith(STDERR)):
        error = metrics.get(f"{name}{STDERR}")
        yield f"| {name} | {metrics[name]:.4g} | {'not known' if error is None else f'{error:.2g}'} |"
