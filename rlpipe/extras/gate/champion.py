"""The champion of a project: the version of its registered model in MLflow that has the alias."""

from __future__ import annotations

import os

from rlpipe.base.errors import UserError
from rlpipe.config.secrecy import with_password_aside
from rlpipe.report.tracking import CHAMPION, ENVIRONMENT, tracking_uri
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from rlpipe.store.run_record import run_names


def champion(run: Run) -> tuple[Run, int] | None:
    """(run, weight version) of the champion of a run's project; None where it has none yet.

    UserError when MLflow cannot be asked, or the champion is not a policy of this store.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    uri, project = tracking_uri(run.config), run.config.tracking.project
    if not uri:
        raise UserError("evaluation.gate_against='champion': tracking.uri is empty, so there is no MLflow to ask")
    try:
        version = MlflowClient(with_password_aside(uri)).get_model_version_by_alias(project, CHAMPION)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None  # no such model, or no such alias
        raise UserError(f"evaluation.gate_against='champion': MLflow does not say which it is: {error}") from error
    name, number = version.tags.get("rlpipe.run", ""), version.tags.get("rlpipe.version", "")
    if number.isdecimal() and name in run_names(run.store):
        other = open_existing(run.store, name)
        policy, _ = other.policy(int(number))
        if policy.sha256 == version.tags.get("rlpipe.policy_sha256"):
            return other, int(number)
    raise UserError(
        f"evaluation.gate_against='champion': version {version.version} of the model {project} is the champion, and is"
        f" no policy of {run.store.url}; use that store, or another policy as run:NAME"
    )
