"""The registered model of a run's project in MLflow: its versions, by alias and by policy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.secrecy import with_password_aside
from rlpipe.report.outages import said_of
from rlpipe.report.tracking import CHAMPION, ENVIRONMENT, GATE_TAG, tracking_uri
from rlpipe.store.backend import Store
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from rlpipe.store.run_record import run_names

ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # no such model, or no such alias


@dataclass(frozen=True)
class RegisteredPolicy:
    """A version of the model, and the policy that its tags name. `verdict`: of its gate; empty
    where it was not judged.
    """

    number: str
    run: str
    version: str
    sha256: str
    verdict: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.run}@{self.version}"

    def in_store(self, store: Store, wanted: str, fix: str) -> tuple[Run, int]:
        """(run, weight version) of the policy; UserError with the fix when it is not in the store.
        `wanted`: what needs it, in the user's words.
        """
        if self.version.isdecimal() and self.run in run_names(store):
            run = open_existing(store, self.run)
            if run.policy(int(self.version))[0].sha256 == self.sha256:
                return run, int(self.version)
        raise UserError(f"{wanted}, version {self.version} of run {self.run}, is no policy of {store.url}; {fix}")


class Registry:
    """The model of a project. Its methods raise UserError when MLflow does not answer. `wanted`:
    what needs it, in the user's words.
    """

    def __init__(self, config: PipelineConfig, wanted: str) -> None:
        from mlflow import MlflowClient

        self._uri, self._wanted, self.project = tracking_uri(config), wanted, config.tracking.project
        if not self._uri:
            raise UserError(f"{wanted}: tracking.uri is empty, so there is no MLflow to ask")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._client = MlflowClient(with_password_aside(self._uri))

    def named(self, alias: str) -> RegisteredPolicy | None:
        """The version that has an alias; None where there is none."""
        try:
            return _policy_of(self._ask(self._client.get_model_version_by_alias, self.project, alias))
        except UserError as error:
            if getattr(error.__cause__, "error_code", "") in ABSENT:
                return None
            raise

    def holding(self, sha256: str) -> RegisteredPolicy | None:
        """The newest version whose policy has this hash; None where it is not registered."""
        versions = self._ask(self._client.search_model_versions, f"name = '{self.project}'")
        policies = [policy for policy in map(_policy_of, versions) if policy.sha256 == sha256]
        return max(policies, key=lambda policy: int(policy.number), default=None)

    def move(self, alias: str, policy: RegisteredPolicy) -> None:
        """Gives a version the alias."""
        self._ask(self._client.set_registered_model_alias, self.project, alias, policy.number)

    def tag(self, policy: RegisteredPolicy, name: str, value: str) -> None:
        """Sets a tag of a version."""
        self._ask(self._client.set_model_version_tag, self.project, policy.number, name, value)

    def _ask(self, call: Callable[..., Any], *arguments: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return call(*arguments)
        except MlflowException as error:
            raise UserError(f"{self._wanted}: {said_of(error, self._uri)}") from error


def champion(run: Run) -> tuple[Run, int] | None:
    """(run, weight version) of the champion of a run's project; None where it has none yet.

    UserError when MLflow cannot be asked, or the champion is not a policy of this store.
    """
    wanted = "evaluation.gate_against='champion'"
    registry = Registry(run.config, wanted)
    if (policy := registry.named(CHAMPION)) is None:
        return None
    fix = "use that store, or another policy as run:NAME"
    return policy.in_store(run.store, f"{wanted}: the champion of {registry.project}", fix)


def _policy_of(entity: Any) -> RegisteredPolicy:
    tags = entity.tags
    names = ("rlpipe.run", "rlpipe.version", "rlpipe.policy_sha256", GATE_TAG)
    return RegisteredPolicy(str(entity.version), *(tags.get(name, "") for name in names))
