"""What the commands of `rlpipe` share: options, the store that they name, and how they fail."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from rlpipe.store.backend import Store, check_access, open_store
from rlpipe.types import UserError

STORE = "./rlpipe-store"
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="override a field of the config")]
StoreUrl = Annotated[str, typer.Option("--store", help="where runs are kept")]


def fail(error: Exception, code: int) -> NoReturn:
    """Says what is wrong and ends with `code`: 2 for the user's fault, 1 for what gave up."""
    typer.echo(f"rlpipe: {error}", err=True)
    raise typer.Exit(code)


class Commands(TyperGroup):
    """What goes wrong in a command is one line, no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except UserError as error:
            fail(error, 2)
        except (RuntimeError, OSError) as error:  # the store, an engine, the trainer or the Prefect server gave up
            fail(error, 1)


def checked_store(url: str) -> Store:
    """The store at `url`; UserError when it cannot be used."""
    store = open_store(url)
    check_access(store)
    return store
