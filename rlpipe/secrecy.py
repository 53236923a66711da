"""How secrets are kept: out of configs, out of messages, and compared in constant time. docs/security.md says where they come from."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator
from typing import Any

_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")
_IN_URL = re.compile(r"https?://[^/\s@]+@|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_NAME = re.compile(
    r"(.*_)?(api_?key|secret|secret_?key|secret_access_key|password|passwd|access_token|auth_token|hf_token|service_key|auth_string)|token",
    re.IGNORECASE,
)


def key_fits(authorization: str, key: str) -> bool:
    """Whether an Authorization header brings the key. How long this takes tells nothing of it; an empty key asks for none."""
    given = authorization.encode(errors="surrogateescape")  # as headers are decoded: what is no UTF-8 is just wrong
    return not key or hmac.compare_digest(given, f"Bearer {key}".encode())


def without_passwords(text: str) -> str:
    """A text without what stands before the @ of its URLs."""
    return _USER.sub("", text)


def refuse_secrets(tree: Any) -> Any:
    """The config tree as it is; ValueError, which does not repeat it, for a config that holds a secret: a config is a Prefect parameter, and is kept in the store."""
    for path, value in _strings(tree, ()):
        if _IN_URL.search(value):
            raise ValueError(
                f"{'.'.join(path)} is a URL with a user or password, which would end up in the store and in Prefect; leave them out "
                "and use the environment: MLFLOW_TRACKING_URI or MLFLOW_TRACKING_TOKEN, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "RLPIPE_SERVICE_KEY, key_env of a reward"
            )
        if value and _NAME.fullmatch(path[-1]):
            raise ValueError(
                f"{'.'.join(path)} looks like a secret, which would end up in the store and in Prefect; set it in the environment of "
                "the processes that need it (child processes inherit it), or call the field otherwise"
            )
    return tree


def _strings(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(tree, str) and path:
        yield path, tree
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from _strings(value, (*path, str(key)))
