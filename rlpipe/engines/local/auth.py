"""Two-key bearer auth: the API key samples, the admin key controls."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rlpipe.secrecy import key_fits

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready"})
CONTROL_PATHS = frozenset(
    {
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/update_weights_from_disk",
        "/flush_cache",
        "/weights_checker",
    }
)


def key_wanted(path: str, api_key: str | None, admin_api_key: str | None) -> str | None:
    """The key that a path takes; None when it is open. With one key set, that key opens everything it guards."""
    assert path.startswith("/"), path
    if path in OPEN_PATHS:
        return None
    if path in CONTROL_PATHS and admin_api_key:
        return admin_api_key
    return api_key


def auth_middleware(api_key: str | None, admin_api_key: str | None) -> Middleware:
    """Answers 401 to requests without the key that their path takes."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = key_wanted(request.path, api_key, admin_api_key)
        if wanted is not None and not key_fits(request.headers.get("Authorization", ""), wanted):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check
