"""`rlpipe view`."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli_services import STORE, StoreUrl, readable_store
from flows.printing import echo

Host = Annotated[str, typer.Option(help="address it listens at; beyond loopback RLPIPE_VIEW_KEY must be set")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="its port; 0: a free one")]


def view(store: StoreUrl = STORE, host: Host = "127.0.0.1", port: Port = 8450) -> None:
    """Look at a store in a browser: runs, groups, rollouts token by token, evaluations. It only
    reads, also while runs write."""
    from rlpipe.view.server import serve_view  # the server takes a moment to import

    serve_view(readable_store(store), host, port, echo)
