"""Shared by the tests of plans."""

from __future__ import annotations

import pytest

from rlpipe.extras.plan.sizes import ModelSizes, SizedModel

SIZES = ModelSizes(parameters=10, layer=1, rest=1, kv_token=1, microbatch=1)
SIZED = SizedModel(10, 0, "packed", SIZES, "no GPU is tried by a plan")


@pytest.fixture
def untried_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan says beside the memory and the hours of its model, which half a minute of passes
    in a process of its own tell."""
    monkeypatch.setattr("rlpipe.extras.plan.report.size_model", lambda config, named: SIZED)
