"""Fetches a policy into a local folder that engines read, from the store or from a nearer copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlpipe.base.errors import UserError
from rlpipe.base.references import ArtifactRef
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.adapters import loads_adapters
from rlpipe.engines.kind import kind_of
from rlpipe.engines.weights import Probe, Weights, same_weights
from rlpipe.models.finite import check_finite
from rlpipe.models.whole import base_and_adapter, whole_policy
from rlpipe.store.artifacts import read_manifest
from rlpipe.store.backend import Store
from rlpipe.store.policy_files import stored_policy

# the folder of the bases into which adapters are merged, beside the merged policies
BASES = "bases"


def fetched(
    config: PipelineConfig,
    store: Store,
    policy: ArtifactRef,
    version: int,
    probe: Probe,
    local: Path,
    before: Weights | None,
    *,
    checked: bool,
) -> Weights:
    """Returns a policy in folders below `local`, for engines that serve `before` now.

    UserError when the policy has another version than `version`.

    `checked`: reads all weights to find NaN. Not done for a policy that the trainer has just
    published, as the reload would wait for it: the probe of the engines finds NaN, too.
    """
    made = read_manifest(store, policy.folder, policy.sha256).weight_version
    # otherwise all tokens would have a wrong version; the base model is version 0, too, or -1 where
    # SFT has made another one
    if made not in (None, max(version, 0)):
        raise UserError(f"version={version}: {policy.folder} is weight version {made}")
    check: Callable[[Path], Path] = check_finite if checked else lambda folder: folder
    bases = local / BASES if config.model.adapter != "none" else None
    if bases is not None:
        base, adapter = base_and_adapter(store, policy, local, bases)
        if loads_adapters(config, base):
            known = before is not None and before.folder == base
            for folder in ([] if known else [base]) + ([adapter] if adapter else []):
                check(folder)
            return Weights(base, version, probe, str(adapter or ""), adapter)
    folder = materialised = check(whole_policy(store, policy, local, bases))
    assert (folder / "config.json").is_file(), f"{folder} is no policy"
    folder = kind_of(config.engines.kind).readable(folder)
    # an adapter that is merged into its base may round to the weights before
    files = weight_hashes(store, policy) if bases is None else {}
    differs = None
    if before is not None:
        same = before.files == files if files and before.files else same_weights(before.folder, folder)
        differs = None if same else before.version
    return Weights(folder, version, probe, materialised=materialised, differs_from=differs, files=files)


def weight_hashes(store: Store, policy: ArtifactRef) -> dict[str, str]:
    """The sha256 of each file of a policy's weights as whole files, also for a delta."""
    files = stored_policy(store, policy).files
    return {name: record.sha256 for name, record in files.items() if name.endswith(".safetensors")}
