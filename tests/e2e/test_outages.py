"""A run whose store on S3 and whose Prefect server are away, fail and hang for a while: the bits of
one that nothing happened to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import s3_world
from tests.outage_world import Fault, Faults
from tests.pipeline import MINI, Folder, Undisturbed
from tests.s3_world import S3Proxy, S3Server

pytestmark = pytest.mark.e2e
S3_STAGES = [
    r"HEAD .*/rl/00000/iteration\.json", r"PUT .*/sft/00000/policy/", r"PUT .*/rollouts/round-0/shard-000/",
    r"HEAD .*/batch/round-0/",
    r"(PUT|POST) .*/rl/00000/policy/", r"GET .*/rl/00001/policy/", r"PUT .*/rl/00001/iteration\.json", r"PUT .*/lease/",
]  # fmt: skip
HELD = r"PUT .*/lease/000000\.json"  # before that a person waits
PREFECT_STAGES = [
    r"POST .*/flow_runs/$",
    r"POST .*/flow_runs/.*/set_state",
    r"POST .*/task_runs/$",
    r"POST .*/artifacts/",
]
NUM_STAGES = {5: 8, 30: 2, 120: 1}  # in one run, by the length of each fault


@pytest.fixture
def proxies(s3_proxy: S3Proxy, prefect_api: dict[str, str]) -> Iterator[tuple[S3Proxy, S3Proxy]]:
    """Before S3, and before Prefect."""
    prefect = S3Proxy(prefect_api["PREFECT_API_URL"])
    yield s3_proxy, prefect
    prefect.close()


def complete(proxies: tuple[S3Proxy, S3Proxy], store: str, path: Path, s3: Faults, prefect: Faults) -> Folder:
    """A run of MINI while these faults happen; all of them did."""
    proxies[0].faults, proxies[1].faults = s3, prefect
    environment = {"AWS_ENDPOINT_URL": proxies[0].url, "PREFECT_API_URL": f"{proxies[1].url}/api"}
    folder = Folder(path, store, environment)
    output = folder.complete("a", *MINI)
    assert [fault.at for fault in (*s3.faults, *prefect.faults) if not fault.has_begun] == []
    assert "Traceback" not in output
    return folder


@pytest.mark.nightly
def test_a_run_goes_on_through_ten_seconds_of_faults(
    proxies: tuple[S3Proxy, S3Proxy], s3_server: S3Server, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    s3 = Faults(Fault(S3_STAGES[4], "503", 4), Fault(S3_STAGES[6], "reset", 2), after=HELD)
    folder = complete(proxies, s3_server.url(), tmp_path, s3, Faults(Fault(PREFECT_STAGES[1], "500", 4)))
    assert folder.final_sha256("a", 5) == undisturbed.sha256(5)


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "fault", "seconds"), [
    (number, *case) for number,
    case in enumerate(itertools.product(["500", "503", "429", "reset", "hang"], [5, 30, 120]))
])  # fmt: skip
def test_a_run_goes_on_through_every_fault_at_every_stage(
    number: int, fault: str, seconds: int, proxies: tuple[S3Proxy, S3Proxy], s3_server: S3Server, tmp_path: Path,
    undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Long faults at some stages a run, others in the next."""
    monkeypatch.setattr(s3_world, "HANG_S", float(seconds))
    chosen = [[stages[(number + index) % len(stages)] for index in range(min(NUM_STAGES[seconds], len(stages)))]
              for stages in (S3_STAGES, PREFECT_STAGES)]  # fmt: skip
    s3, prefect = (
        Faults(*(Fault(at, fault, seconds) for at in stages), after=after)
        for stages, after in zip(chosen, (HELD, ""), strict=True)
    )
    folder = complete(proxies, s3_server.url(), tmp_path, s3, prefect)
    assert folder.final_sha256("a", 5) == undisturbed.sha256(5)
