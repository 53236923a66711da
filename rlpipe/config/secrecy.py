"""How secrets are kept: out of configs, out of messages, and compared in constant time. docs/security.md says where they come from."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")
_IN_URL = re.compile(r"https?://[^/\s@]+@|[a-z][a-z0-9+.-]{0,20}://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_QUERY = re.compile(r"[?&]([^=&?]+)=[^&]")
_TOKENS = "access|auth|bearer|session|tracking|refresh|hf|hub|github|gitlab|api|secret|security|id"  # not eos_token, a model's
_NAME = re.compile(
    r"(.*_)?(api_?key|secret|secret_?key|secret_access_key|access_key|private_key|service_key|password|passwd|authorization|cookie|"
    rf"credentials?|auth_string|({_TOKENS})_token)|pgpassword|token",
    re.IGNORECASE,
)
_QUERY_NAME = re.compile(r"key|sig|signature|x_amz_signature|x_amz_security_token|auth", re.IGNORECASE)


def key_fits(authorization: str, key: str) -> bool:
    """Whether an Authorization header brings the key. How long this takes tells nothing of it; an empty key asks for none."""
    given = authorization.encode(errors="surrogateescape")  # as headers are decoded: what is no UTF-8 is just wrong
    return not key or hmac.compare_digest(given, f"Bearer {key}".encode())


def with_password_aside(uri: str) -> str:
    """MLflow's http URI without user and password, which it finds in the environment: it prints the URI of a run that ended."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.username:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return without_passwords(uri)


def without_passwords(text: str) -> str:
    """A text without what stands before the @ of its URLs."""
    return _USER.sub("", text)


def refuse_secrets(tree: Any) -> None:
    """ValueError, which does not repeat it, for a config that holds a secret: a config is a Prefect parameter, and is kept in the store."""
    for path, value in _strings(tree, ()):
        where = ".".join(path)
        if _IN_URL.search(value):
            raise ValueError(
                f"{where} is a URL with a user or password, which would end up in the store and in Prefect; leave them out "
                "and use the environment: MLFLOW_TRACKING_URI or MLFLOW_TRACKING_TOKEN, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "RLPIPE_SERVICE_KEY, key_env of a reward"
            )
        named = _QUERY.findall(value) if "://" in value else []
        if any(_is_secret(name) or _QUERY_NAME.fullmatch(name.replace("-", "_")) for name in named):
            raise ValueError(
                f"{where} is a URL whose query holds a key, which would end up in the store and in Prefect; put the URL into a "
                "variable of the environment (a reward takes it as url = '$NAME')"
            )
        flag = re.match(r"-*([\w-]+)(=|$)", value) if path[-1].isdecimal() else None  # of a list: --api-key, or NAME=value
        if value and (_is_secret(path[-1]) or (flag and _is_secret(flag[1]))):
            raise ValueError(
                f"{where} looks like a secret, which would end up in the store and in Prefect; set it in the environment of "
                "the processes that need it (child processes inherit it), or call the field otherwise"
            )


def _is_secret(name: str) -> bool:
    """Whether what has this name is one."""
    return _NAME.fullmatch(name.replace("-", "_")) is not None


def _strings(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each text with its place. Entries of a list are called by their names, as `--set` takes them, or numbered."""
    if isinstance(tree, str) and path:
        yield path, tree
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _strings(value, (*path, str(key)))
    if isinstance(tree, list):
        for index, value in enumerate(tree):
            name = value.get("name") if isinstance(value, dict) else None
            yield from _strings(value, (*path, name if isinstance(name, str) else str(index)))
