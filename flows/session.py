"""The session of a run, with what Prefect does for it: services are runs of deployments."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial

from rlpipe.config import PipelineConfig
from rlpipe.stages import session
from tasks.start_service import start_service


def open_session(config: PipelineConfig) -> AbstractAsyncContextManager[session.Session]:
    """The session of a run, opened by the outermost flow, shared by those inside it."""
    return session.open_session(config, partial(start_service, config))
