"""`rlpipe server`: on SQLite, writers at the same time wait for
one another, and none is refused."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from tests.deadlines import DEADLINE_S, until
from tests.pipeline import BIN
from tests.prefect_stand import Stand, bare_server

pytestmark = pytest.mark.e2e
WRITERS, RUNS = 3, 20


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with bare_server(tmp_path_factory.mktemp("server")) as stand:
        yield stand


def test_flow_runs_artifacts_and_logs_written_at_once_are_all_taken(stand: Stand) -> None:
    flow = stand.api("POST", "/flows/", {"name": "busy"})["id"]
    taken: list[int] = []

    def post(path: str, body: object) -> Any:
        """No second try: one refusal fails the test."""
        request = urllib.request.Request(
            f"{stand.environment['PREFECT_API_URL']}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                taken.append(answer.status)
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            taken.append(error.code)
            raise

    def write(writer: int) -> None:
        for number in range(RUNS):
            run = post("/flow_runs/", {"flow_id": flow, "state": {"type": "PENDING"}})["id"]
            for state in ("RUNNING", "COMPLETED"):
                post(f"/flow_runs/{run}/set_state", {"state": {"type": state}})
            post("/artifacts/", {"key": f"of-{writer}-{number}", "type": "markdown", "data": "x", "flow_run_id": run})
            post(
                "/logs/",
                [{"name": "a", "level": 20, "message": "x", "timestamp": "2026-01-01T00:00:00Z", "flow_run_id": run}],
            )

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(write, range(WRITERS)))
    assert Counter(taken) == {201: 5 * RUNS * WRITERS}
    assert "database is locked" not in (stand.path / "server.log").read_text()


def test_an_event_that_is_sent_twice_is_kept_once_with_its_resources(stand: Stand) -> None:
    events = [
        {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": name,
            "resource": {"prefect.resource.id": "a.thing"},
            "related": [{"prefect.resource.id": "another.thing", "prefect.resource.role": "other"}],
        }
        for name in ("went", "came")
    ]
    request = urllib.request.Request(
        f"{stand.environment['PREFECT_API_URL']}/events",
        json.dumps([*events, events[0]]).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert answer.status == 204
    wanted = {"filter": {"related": {"id": ["another.thing"]}}}

    def kept() -> list[dict[str, Any]]:
        found = stand.api("POST", "/events/filter", wanted)["events"]
        return found if len(found) >= len(events) else []

    assert sorted(event["id"] for event in until(kept)) == sorted(str(event["id"]) for event in events)
    assert "Traceback" not in (stand.path / "server.log").read_text()


def test_it_does_not_go_to_the_background() -> None:
    told = subprocess.run(
        [str(BIN / "rlpipe"), "server", "--port", "1", "-b"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (told.returncode, told.stdout) == (2, "") and "-b: rlpipe server stays in front" in told.stderr


def test_a_queue_is_paused_and_resumed_at_once(stand: Stand) -> None:
    """The server reads in a second session inside the transaction: it must not wait for itself."""
    stand.api("POST", "/work_pools/", {"name": "a-pool", "type": "process"})
    for is_paused in (True, False):
        request = urllib.request.Request(
            f"{stand.environment['PREFECT_API_URL']}/work_pools/a-pool/queues/default",
            json.dumps({"is_paused": is_paused}).encode(),
            {"Content-Type": "application/json"}, method="PATCH",
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            assert answer.status == 204
        assert stand.api("GET", "/work_pools/a-pool/queues/default")["is_paused"] is is_paused
