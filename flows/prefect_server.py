"""Prefect's server, with SQLite transactions that wait for one another, and quicker inserts of
events: `python -m flows.prefect_server [OPTIONS of prefect server start]`.

Prefect 3.8 begins most transactions as readers. SQLite fails a reader that writes when another
transaction has written since it began, without the minute of waiting that Prefect sets: the caller
gets 503 and tries again after 2 s. A transaction that begins as a writer waits for the one before
it. On Postgres, which a team uses, there is no difference.

Prefect inserts events into SQLite by a statement with all values in it, which SQLAlchemy compiles
again each time. Its statement for Postgres is compiled once, and SQLite has known it since 3.35.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from rlpipe.processes.memory import lasting_objects

with lasting_objects():
    from prefect.cli import app
    from prefect.server.api import server  # noqa: F401  # else the command imports it
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
    from prefect.server.events.storage import database as events
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

prefect_begins = AioSqliteConfiguration.begin_transaction


@asynccontextmanager
async def begin_as_writer(
    self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
) -> AsyncGenerator[AsyncSessionTransaction, None]:
    async with prefect_begins(self, session, with_for_update=True) as transaction:
        await session.connection()  # begins it now
        # a session opened inside of it, to read, must not be a writer: it would wait for this one
        token = SQLITE_BEGIN_MODE.set(None)
        try:
            yield transaction
        finally:
            SQLITE_BEGIN_MODE.reset(token)


if __name__ == "__main__":
    AioSqliteConfiguration.begin_transaction = begin_as_writer
    events._write_sqlite_events = events._write_postgres_events  # pyright: ignore[reportPrivateUsage]
    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    app()
