"""Promotion: gives an alias of the project's model in MLflow to a policy that passed its gate, and
gives it back. What a flow or an event says of a policy is not believed: MLflow has its verdict, the
store its evaluation.

Each step may be done twice: the alias that says what is in production moves last.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from rlpipe.base.errors import UserError
from rlpipe.config.source import override_config
from rlpipe.extras.gate.command import gate_report
from rlpipe.extras.gate.registry import RegisteredPolicy, Registry
from rlpipe.report.tracking import CHAMPION, GATE_TAG
from rlpipe.store.backend import Store
from rlpipe.store.opening import open_existing
from rlpipe.store.run import Run
from rlpipe.store.run_record import last_started
from rlpipe.stored.remaking import committed_version

PREVIOUS = "previous"  # the alias of what was in production before
# of MLflow's: `latest` and `v3` name versions by themselves
ALIAS, RESERVED = re.compile(r"[A-Za-z0-9_-]{1,255}"), re.compile(r"latest|v\d+", re.IGNORECASE)
REASON_TAG = "rlpipe.rolled_back"


@dataclass(frozen=True)
class AliasMove:
    """The outcome of a promotion or a rollback: whether the alias moved, or why not, in one line;
    where the gate failed, with its report.
    """

    moved: bool
    said: str
    gate_failed: bool = False
    report: list[str] = field(default_factory=list)


def promote(store: Store, name: str, version: int, alias: str) -> AliasMove:
    """Gives a policy the alias, if its gate passed, and it holds to the rules of its run's last
    start against the policy that has the alias now, which becomes `previous`.

    UserError when the policy is not registered, or the two cannot be compared.
    """
    run, registry, policy = _registered(store, name, version, "promote", alias)
    now = registry.named(alias)
    if now == policy:
        return AliasMove(False, f"{policy} is {alias} already")
    if policy.verdict != "passed":
        verdict = f"its gate says {policy.verdict!r}" if policy.verdict else "no gate has judged it"
        return AliasMove(False, f"{policy} is not promoted: {verdict} ({GATE_TAG} in MLflow)", gate_failed=True)
    if now is not None:
        fix = f"promote from that store, or delete the alias {alias} in MLflow"
        other, before = now.in_store(store, f"promote: the {alias} of {registry.project}", fix)
        against = json.dumps(f"run:{other.name}@{before}")
        config = override_config(last_started(store, name), [f"evaluation.gate_against={against}"])
        report = gate_report(run, version, config)
        if not report.passed:
            said = f"{policy} is not promoted: it fails its gate against {now}, which is {alias}"
            return AliasMove(False, said, gate_failed=True, report=report.lines())
        registry.move(PREVIOUS, now)
    registry.move(alias, policy)
    return AliasMove(True, f"{policy} is {alias}" + (f", and {now} is {PREVIOUS}" if now else ""))


def roll_back(store: Store, name: str, version: int, alias: str, because: str) -> AliasMove:
    """Takes the alias from a policy that a later evaluation revoked, or of which somebody says why
    (`because`), and gives it back to `previous`; so the alias `champion`, if the policy has it. It
    is not promoted again.

    UserError when neither is so, or no good policy is `previous`.
    """
    _, registry, policy = _registered(store, name, version, "rollback", alias)
    now = registry.named(alias)
    if now != policy:
        return AliasMove(False, f"{policy} is not {alias}" + (f", {now} is" if now else ""))
    if policy.verdict != "revoked" and not because:
        raise UserError(
            f"rollback: the gate of {policy} says {policy.verdict or 'nothing'!r}, not 'revoked'; say why it is rolled"
            " back all the same: because='...'"
        )
    before = registry.named(PREVIOUS)
    if before is None or before == policy or before.verdict == "revoked":
        state = "revoked, too" if before and before != policy else "no other version"
        raise UserError(f"rollback: {PREVIOUS} is {state}; give the alias {alias} to a good version in MLflow")
    registry.tag(policy, GATE_TAG, "revoked")
    registry.tag(policy, REASON_TAG, because or "a later evaluation failed its gate")
    if registry.named(CHAMPION) == policy:
        registry.move(CHAMPION, before)
    registry.move(alias, before)
    return AliasMove(True, f"{before} is {alias} again, in place of {policy}")


def _registered(
    store: Store, name: str, version: int, wanted: str, alias: str
) -> tuple[Run, Registry, RegisteredPolicy]:
    """The run, the model of its project, and the version of it that has this policy."""
    if alias in (PREVIOUS, CHAMPION):
        raise UserError(f"alias={alias!r}: rlpipe moves that one itself; name another, for example production")
    if not ALIAS.fullmatch(alias) or RESERVED.fullmatch(alias):  # MLflow says so after `previous` has moved
        raise UserError(f"alias={alias!r}: use letters, digits, _ and -, but neither latest nor v with a number")
    run = open_existing(store, name)
    registry = Registry(last_started(store, name), wanted)
    policy = registry.holding(run.policy(committed_version(run, version))[0].sha256)
    if policy is None:
        raise UserError(
            f"{wanted}: version {version} of run {name} is no version of {registry.project} in MLflow; a run registers"
            " the policy that it ends with"
        )
    return run, registry, policy
