"""The name of a run that was given none: another one for every flow run, the same on Retry."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from uuid import UUID

import pytest
from prefect.client.schemas.objects import CreatedBy, FlowRun
from prefect.context import FlowRunContext

from flows.session import own_name

NIGHT = datetime(2026, 11, 22, 2, 0, tzinfo=UTC)
BATCH = ["019aa000-0000-7000-8000-00000000aaa1", "019aa000-0000-7000-8000-00000000aaa2"]  # ids of one batch begin alike


def name_of(flow_run_id: str, slug: str | None) -> str:
    creator = CreatedBy(id=UUID(BATCH[0]), type="SCHEDULE", display_value=slug) if slug else None
    flow_run = FlowRun(id=UUID(flow_run_id), flow_id=UUID(BATCH[0]), expected_start_time=NIGHT, created_by=creator)
    with FlowRunContext.model_construct(flow_run=flow_run):
        return own_name()


def test_a_scheduled_run_is_named_by_schedule_time_and_id() -> None:
    assert name_of(BATCH[0], "nightly") == "nightly-2026-11-22-0200-00aaa1"
    assert name_of(BATCH[0], "nightly") != name_of(BATCH[1], "nightly")


@pytest.mark.parametrize("slug", [None, "every hour / team ä", "-", "x" * 200])
def test_any_name_is_a_folder_name(slug: str | None) -> None:
    name = name_of(BATCH[1], slug)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name) and name.endswith("-2026-11-22-0200-00aaa2")


def test_a_schedule_without_a_slug_is_called_scheduled() -> None:
    assert name_of(BATCH[0], "CronSchedule") == "scheduled-2026-11-22-0200-00aaa1"
