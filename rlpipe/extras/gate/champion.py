"""The champion of a project: the version of its registered model in MLflow that has the alias."""

from __future__ import annotations

from rlpipe.base.errors import UserError
from rlpipe.report.tracking import champion_tags, tracking_uri
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from rlpipe.store.run_record import run_names


def champion(run: Run) -> tuple[Run, int] | None:
    """(run, weight version) of the champion of a run's project; None where it has none yet.

    UserError when MLflow cannot be asked, or the champion is not a policy of this store.
    """
    if not tracking_uri(run.config):
        raise UserError("evaluation.gate_against='champion': tracking.uri is empty, so there is no MLflow to ask")
    if (tags := champion_tags(run.config)) is None:
        return None
    name, version = tags.get("rlpipe.run", ""), tags.get("rlpipe.version", "")
    if version.isdecimal() and name in run_names(run.store):
        other = open_existing(run.store, name)
        if other.policy(int(version))[0].sha256 == tags.get("rlpipe.policy_sha256"):
            return other, int(version)
    raise UserError(
        f"evaluation.gate_against='champion': the champion of {run.config.tracking.project}, version {version} of run"
        f" {name}, is no policy of {run.store.url}; use that store, or another policy as run:NAME"
    )
