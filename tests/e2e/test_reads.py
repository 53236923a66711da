"""A run on S3 downloads nothing that its node made or has read: the requests of all its processes
are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlpipe.store.backend import open_store
from rlpipe.store.opening import open_existing
from rlpipe.store.progress import Progress
from tests.pipeline import MINI, Folder, Undisturbed
from tests.s3_world import S3Proxy, S3Server

pytestmark = pytest.mark.e2e
ITERATIONS = 5


def test_a_node_downloads_no_data_file_and_ends_with_the_same_bits(
    tmp_path: Path, s3_server: S3Server, s3_proxy: S3Proxy, prefect_api: dict[str, str], undisturbed: Undisturbed
) -> None:
    environment = {**s3_server.environment, "AWS_ENDPOINT_URL": s3_proxy.url, **prefect_api}
    folder = Folder(tmp_path, s3_server.url(), environment, tracked=True)  # MLflow gets a table of each batch
    folder.complete("a", *MINI)
    requests = list(s3_proxy.requests)
    sent = {request.path for request in requests if request.method == "PUT" and request.path.endswith(".parquet")}
    downloads = Counter(request.path for request in requests if request.method == "GET")
    kinds = {path.rpartition("/")[2] for path in sent}
    assert {"conversations.parquet", "prompts.parquet", "rollouts.parquet", "scores.parquet", "batch.parquet"} <= kinds
    assert [path for path in downloads if path.endswith(".parquet")] == []
    by_hash = "/batch/round-0/manifest.json"  # later stages name it by its sha256 alone
    assert {path: count for path, count in downloads.items() if path.endswith(by_hash) and count > 1} == {}
    assert folder.final_sha256("a", ITERATIONS) == undisturbed.sha256()
    assert folder.rlpipe("verify", "a", "--store", folder.store)[0] == 0
    run = open_existing(open_store(folder.store), "a")
    assert Progress(run).num_iterations == ITERATIONS
    assert not list(tmp_path.glob(".rlpipe/*/cache")), "it goes with the run"
