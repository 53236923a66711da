"""Makes a whole model, in a local folder, of a policy that is stored whole or as an adapter.
Imports no torch for a whole one.
"""

from __future__ import annotations

from pathlib import Path

from rlpipe.base.references import ArtifactRef
from rlpipe.store.backend import Store
from rlpipe.store.local_copy import made_once, materialise
from rlpipe.store.policy_files import base_of


def base_and_adapter(store: Store, ref: ArtifactRef, local_dir: Path, bases_dir: Path) -> tuple[Path, Path | None]:
    """The local folders of a policy's base, below `bases_dir`, and of its adapter; for a whole
    policy its own folder, and None.
    """
    base = base_of(store, ref)
    whole = materialise(store, base or ref, bases_dir)
    return whole, materialise(store, ref, local_dir) if base else None


def whole_policy(store: Store, ref: ArtifactRef, local_dir: Path, bases_dir: Path | None = None) -> Path:
    """Returns a local folder below `local_dir` with a policy as a whole model in HF format: its
    files, or its adapter merged into its base.

    It is made once, verified, and appears atomically. StoreError when an adapter and its base do
    not fit. Whole policies, which may be bases, are put below `bases_dir` if one is given, so that
    a base is fetched once for all its adapters.
    """
    whole, adapter = base_and_adapter(store, ref, local_dir, bases_dir or local_dir)
    if adapter is None:
        return whole
    target = local_dir / f"{adapter.name}-merged"
    if not target.is_dir():
        from rlpipe.models.merge import merge  # imports torch, which takes seconds

        with made_once(target) as partial:
            merge(whole, adapter, partial)
    return target
