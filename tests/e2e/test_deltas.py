"""A run whose policies are stored as differences, killed and continued with another
`checkpoint.full_every` and its local copies elsewhere, ends with the same bits."""

from __future__ import annotations

import pytest

from rlpipe.store.opening import open_existing
from rlpipe.store.policy_files import dependencies, stored_policy
from tests.pipeline import MINI, Folder, Undisturbed, kill_group

pytestmark = pytest.mark.e2e
ITERATIONS = 5


@pytest.mark.nightly
def test_differences_end_with_the_bits_of_whole_policies(folder: Folder, undisturbed: Undisturbed) -> None:
    process = folder.start(*folder.run_arguments("a", *MINI, "checkpoint.full_every=3"))
    try:
        folder.wait_for("a", "rl/00001/policy/manifest.json", process)
    finally:
        kill_group(process)
    folder.complete("a", *MINI, "checkpoint.full_every=10", f"scratch={folder.path}/fast")
    assert any((folder.path / "fast").glob("a-*/trainer.log"))
    code, output = folder.rlpipe("verify", "a", "--store", folder.store)
    assert code == 0, output
    stores = folder.open_store(), undisturbed.folder.open_store()
    run, other = (open_existing(store, "a") for store in stores)
    for version in range(ITERATIONS + 1):
        digests = [
            {name: record.sha256 for name, record in stored_policy(store, run.policy(version)[0]).files.items()}
            for store, run in zip(stores, (run, other), strict=True)
        ]
        assert digests[0] == digests[1], f"weight version {version}"
    chains = [len(dependencies(stores[0], run.policy(version)[0])) for version in range(ITERATIONS + 1)]
    assert chains[:3] == [0, 1, 2] and chains[4] == chains[3] + 1 and chains[5] == 0, chains
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.sha256()
    metrics = run.record(1).metrics
    assert 0 < metrics["checkpoint/stored_bytes"] < metrics["checkpoint/policy_bytes"]
