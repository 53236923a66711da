"""Checks of the address of an S3 bucket, before it is passed to obstore.

On text that is no address, obstore's code panics, which prints and is no Exception.
"""

from __future__ import annotations

import errno
import ipaddress
import re
from urllib.parse import urlsplit

BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\.?")
PRINTED = re.compile(r"[!-~]*")
REGION = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_address(bucket: str, endpoint: str | None, region: str) -> None:
    """OSError that names the bucket, endpoint or region that is not valid.

    Text that may hold a password is not repeated.
    """
    if not BUCKET.fullmatch(bucket):
        raise _fault(f"{bucket!r:.100} is no name of a bucket: letters, digits, '.', '_' and '-'")
    if not REGION.fullmatch(region):
        raise _fault(
            f"the region {region!r:.100} (AWS_REGION, or region of the profile) is none: letters, digits and '-'"
        )
    if endpoint is not None and (fault := _fault_of(endpoint)):
        said = "" if "@" in endpoint else f" {endpoint!r:.200}"
        raise _fault(
            f"the endpoint{said} (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or the profile) {fault}; write https://HOST or"
            " http://HOST:PORT"
        )


def check_key(access_key: str, token: str) -> None:
    """PermissionError where one of them cannot be in an HTTP header, mostly for a line break at its
    end.
    """
    if not PRINTED.fullmatch(access_key + token):
        raise PermissionError(
            errno.EACCES,
            "AWS_ACCESS_KEY_ID or AWS_SESSION_TOKEN holds a line break or another character that no key has",
        )


def _fault_of(endpoint: str) -> str:
    """The reason why an endpoint is no address of a server; empty when it is one."""
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname or "", url.port
        if ":" in host:
            ipaddress.IPv6Address(host)
    except ValueError as error:  # for a port above 65535, or an open bracket
        return f"is no address ({error})"
    if url.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if "@" in url.netloc:
        return "holds a user or a password, which belong into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if (
        not PRINTED.fullmatch(endpoint)
        or url.query
        or url.fragment
        or not (":" in host or HOST.fullmatch(host))
        or port == 0
    ):
        return "is no address of a server"
    return ""


def _fault(text: str) -> OSError:
    return OSError(errno.EINVAL, text)
