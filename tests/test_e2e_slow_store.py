"""A run on an S3 that is slower than it makes policies: it samples before they are committed, and ends with the bits of a run on a fast disk."""

from __future__ import annotations

import time

import pytest

from rlpipe.store.run import open_existing
from rlpipe.types import moment_of
from tests.pipeline import MINI, Folder, Undisturbed
from tests.s3_world import S3Proxy, S3Request, S3Server

pytestmark = pytest.mark.e2e
BYTES_PER_S = 3e6  # a policy of MINI has 3.4 MB
ITERATIONS = 2


class SlowCable:
    """What each answer of the S3 waits for: one cable for all of them. `committed`: when the policies' manifests were there."""

    def __init__(self) -> None:
        self.committed: dict[str, float] = {}

    def passes(self, request: S3Request) -> bool:
        time.sleep((request.sent_bytes + request.answered_bytes) / BYTES_PER_S)  # the proxy answers one at a time
        if request.method == "PUT" and request.path.endswith("/policy/manifest.json"):
            self.committed.setdefault(request.path.split("/")[-3], time.time())
        return False


def test_a_run_on_a_slow_s3_samples_before_its_policies_are_committed_and_has_the_same_bits(
    folder: Folder, s3_server: S3Server, s3_proxy: S3Proxy, undisturbed: Undisturbed
) -> None:
    cable = SlowCable()
    s3_proxy.loses = cable.passes
    slow = Folder(
        folder.path, s3_server.url(), {**folder.environment, **s3_server.environment, "AWS_ENDPOINT_URL": s3_proxy.url}
    )
    slow.complete("a", *MINI, f"rl.num_iterations={ITERATIONS}")
    s3_proxy.loses = lambda request: False
    run = open_existing(slow.open_store(), "a")
    _, shard = run.committed("rl", 1, "rollouts/round-0/shard-000")
    assert moment_of(shard.started_at, "rollouts").timestamp() < cable.committed["00000"]
    assert slow.final_sha256("a", ITERATIONS) == undisturbed.folder.final_sha256("a", ITERATIONS)
    code, output = slow.rlpipe("verify", "a", "--store", slow.store)
    assert code == 0 and " 0 faults" in output, output
