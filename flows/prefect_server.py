"""Prefect's server, whose transactions on SQLite wait for one another:
`python -m flows.prefect_server [OPTIONS of prefect server start]`.

Prefect 3.8 begins most transactions as a reader's. SQLite fails one that writes when another has
written since it began, without the minute of waiting that Prefect asks it for: the caller is
answered 503 and comes again after 2 s. Begun as a writer's, a transaction waits for the one before
it. Postgres, which a team takes, does not know the difference.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefect.cli import app
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

prefect_begins = AioSqliteConfiguration.begin_transaction


@asynccontextmanager
async def begin_as_writer(
    self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
) -> AsyncGenerator[AsyncSessionTransaction, None]:
    async with prefect_begins(self, session, with_for_update=True) as transaction:
        await session.connection()  # begins it now
        # a session that is opened inside of it, to read, is no writer's: it would wait for this one
        token = SQLITE_BEGIN_MODE.set(None)
        try:
            yield transaction
        finally:
            SQLITE_BEGIN_MODE.reset(token)


if __name__ == "__main__":
    AioSqliteConfiguration.begin_transaction = begin_as_writer
    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    app()
