"""`rlpipe view`: pages over a store, for a browser on this machine.

They only read, and their whole state is in the address.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

import jinja2
import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.printable import printable
from rlpipe.base.values import JsonDict
from rlpipe.extras.view import pages, pages_rollouts, searches
from rlpipe.extras.view.library import Library
from rlpipe.extras.view.pages import Page
from rlpipe.extras.view.plots import Plot
from rlpipe.report.curves import reward_svg
from rlpipe.services.registration import LOOPBACK
from rlpipe.store.backend import Store
from rlpipe.store.documents import LaterVersion
from rlpipe.store.forks import forked_from

VIEW_KEY_VARIABLE = "RLPIPE_VIEW_KEY"
LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]  # as browsers name them
INDEX_MAX = 2**31 - 1  # of a group or a rollout
Show = Callable[[Library, pages.Place, QueryParams], Page]
PAGES: dict[str, Show] = {
    "/": pages.runs_page,
    "/compare": pages.compare_page,
    "/search": pages_rollouts.search_page,
    "/searches/{search}": searches.candidates_page,
    "/runs/{run}": pages.run_page,
    "/runs/{run}/prompts": pages_rollouts.prompt_page,
    "/runs/{run}/evaluations": pages.evaluations_page,
}
PAGES_OF_GROUPS: dict[str, Show] = {  # below /runs/RUN/iterations, and /runs/RUN/evaluations
    "/{number}": pages_rollouts.groups_page,
    "/{number}/groups/{group:int}": pages_rollouts.group_page,
    "/{number}/groups/{group:int}/rollouts/{rollout:int}": pages_rollouts.rollout_page,
}
KINDS = {"view.js": "text/javascript", "view.css": "text/css", "plotly.js": "text/javascript"}
HEADERS = {
    # no script but ours, none inside a page: what a policy wrote cannot run,
    # whatever a template forgets to escape
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def view_key(host: str) -> str:
    """The password of the pages; empty: none.

    UserError when other machines could reach them without one.
    """
    key = os.environ.get(VIEW_KEY_VARIABLE, "").strip()
    if host not in LOOPBACK and not key:
        raise UserError(
            f"--host {host}: beyond loopback the view needs a key, which browsers ask for as a password: set"
            f" {VIEW_KEY_VARIABLE}, or stay on 127.0.0.1 and reach it through `ssh -L`"
        )
    return key


class Guard:
    """Asks for the key, where there is one, as the password of any user, and adds the headers that
    isolate a page.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        if self._key and not secrets.compare_digest(_password(Headers(scope=scope)), self._key):
            answer = PlainTextResponse(
                f"the key, please: the value of {VIEW_KEY_VARIABLE}, as the password of any user",
                401,
                {"WWW-Authenticate": 'Basic realm="rlpipe view", charset="UTF-8"'},
            )
            await answer(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def _password(headers: Headers) -> bytes:
    """The password of HTTP's basic authentication; empty without one."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2] if kind.lower() == "basic" else b""
    except ValueError:
        return b""


@cache
def static_files() -> dict[str, bytes]:
    """The scripts and styles of the pages: rlpipe's own, and Plotly's from its package."""
    own = files("rlpipe.extras.view") / "static"
    plotly = files("plotly") / "package_data" / "plotly.min.js"
    return {name: (plotly if name == "plotly.js" else own / name).read_bytes() for name in KINDS}


@cache
def static_address(name: str) -> str:
    """The address of one of the static files. It changes with the content, so browsers may cache
    it.
    """
    return f"/static/{hashlib.sha256(static_files()[name]).hexdigest()[:12]}/{name}"


def address(path: str, query: QueryParams | None = None, **changes: Any) -> str:
    """A path with the query of a page, some of it changed; None leaves a parameter out."""
    items = [(key, value) for key, value in (query.multi_items() if query else []) if key not in changes]
    items += [(key, str(value)) for key, value in changes.items() if value is not None]
    return path + (f"?{urlencode(items)}" if items else "")


def number(value: float | None) -> str:
    """A number in at most four digits; a dash where there is none."""
    return "–" if value is None else f"{value:.4g}"


def as_json(plots: list[Plot]) -> list[JsonDict]:
    return [asdict(plot) for plot in plots]


def shown(value: Any) -> Any:
    """A value as a page shows it: text from policies and data is made `printable`."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def svg(curve: list[list[float | int]]) -> Markup:
    """The reward so far, drawn without a script: it holds only numbers."""
    return Markup(reward_svg(curve, 300, 48))


@cache
def templates() -> jinja2.Environment:
    """The templates. All that they show is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlpipe.extras.view"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
    )
    environment.filters |= {"number": number, "as_json": as_json, "svg": svg}
    environment.globals |= {"address": address, "static": static_address, "dropped_of": pages.dropped_of}
    environment.globals["forked_from"] = forked_from
    environment.globals |= {"SHOWS": pages.SHOWS, "ORDERS": pages_rollouts.ORDERS, "COLOURS": pages_rollouts.COLOURS}
    return environment


def view_app(store: Store, key: str = "") -> ASGIApp:
    """The pages over a store.

    Without a key, only requests under a name of loopback are answered: a page of another site whose
    name resolves to this machine (DNS rebinding) is refused.
    """
    library = Library(store)
    for name in KINDS:  # now, and not while the first page is waited for
        static_address(name)

    def rendered(request: Request, page: Page, status: int = 200) -> Response:
        values = {"store": store.url, "path": request.url.path, "query": request.query_params, **page.values}
        return HTMLResponse(
            templates().get_template(page.template).render(values), status, {"Cache-Control": "no-cache"}
        )

    def refused(request: Request, message: str, status: int = 404) -> Response:
        return rendered(request, Page("error.html", {"message": message}), status)

    def answer(show: Show, kind: str, request: Request) -> Response:
        place = request.path_params | {"kind": kind, "path": request.url.path}
        if any(isinstance(value, int) and value > INDEX_MAX for value in place.values()):
            return refused(request, f"{request.url.path[:200]}: no group has such a number")
        try:
            return rendered(request, show(library, place, request.query_params))
        except UserError as error:
            return refused(request, str(error))
        except LaterVersion as error:
            return refused(request, str(error), 501)  # not implemented
        except (StoreError, OSError) as error:
            return refused(request, str(error), 500)

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in KINDS or request.url.path != static_address(name):
            return PlainTextResponse("not there", 404)
        return Response(
            static_files()[name], 200, {"Cache-Control": "public, max-age=31536000, immutable"}, KINDS[name]
        )

    shown = [(path, show, "") for path, show in PAGES.items()]
    for kind in ("iterations", "evaluations"):
        shown += [(f"/runs/{{run}}/{kind}{path}", show, kind) for path, show in PAGES_OF_GROUPS.items()]
    routes = [Route(path, partial(answer, show, kind)) for path, show, kind in shown]
    routes += [Route("/static/{digest}/{name}", static)]
    not_there = {404: lambda request, _: refused(request, f"{request.url.path[:200]}: no page has this address")}
    app = Starlette(routes=routes, exception_handlers=not_there)
    return TrustedHostMiddleware(Guard(app, key), ["*"] if key else LOOPBACK_NAMES, www_redirect=False)


def serve_view(store: Store, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves the pages until SIGINT or SIGTERM; `say` gets the address.

    UserError when it cannot listen there.
    """
    key = view_key(host)
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {host} --port {port}: cannot listen there ({error}); --port 0 takes a free one"
        ) from error
    with listening:
        name = f"[{host}]" if ":" in host else host
        say(f"http://{name}:{listening.getsockname()[1]}/ shows the runs in {store.url}; Ctrl-C ends it")
        config = uvicorn.Config(
            view_app(store, key), log_level="warning", access_log=False, server_header=False, proxy_headers=False
        )
        uvicorn.Server(config).run(sockets=[listening])
