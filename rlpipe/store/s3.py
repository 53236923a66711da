"""Objects of one S3 bucket, through obstore (object_store of Rust), whose transfers run in threads
of its own, beside the interpreter.

Endpoint, region and keys are found as by every AWS tool: in the environment, in ~/.aws, from the
machine's role.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import obstore
from botocore.exceptions import BotoCoreError, HTTPClientError, MetadataRetrievalError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.session import Session
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from rlpipe.store.patience import PASSING_STATUSES, Answer, Passing, persistently
from rlpipe.store.s3_address import check_address, check_key
from rlpipe.store.transfer import PART_BYTES, PARTS, PIECE_BYTES, parts_ahead, write_at

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

SMALL_BYTES = 1024 * 1024
PARTS_MAX = 10_000  # of an upload, by S3's own rule
CONNECT = timedelta(seconds=5)
SILENCE = timedelta(seconds=20)  # without data from the server, or without answer to a small request
PART = timedelta(minutes=5)  # to send one part of an upload, or to read one: 8 MiB
# by obstore itself, of a page of a listing or a part of an upload, so that it need not begin anew;
# the rest is rlpipe/store/patience.py
RETRY: RetryConfig = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=2), "base": 3},
}
RETRY_PARTS: RetryConfig = RETRY | {"max_retries": 12, "retry_timeout": timedelta(seconds=15)}
KEYS = timedelta(minutes=10)  # obstore asks for keys again five minutes before they end
NO_ANSWER = NoConnection, HTTPClientError, MetadataRetrievalError  # of who has the keys
_NOISE = re.compile(
    r"^Generic S3 error: | in [\d.]+\S*s(, after \d+ retries, max_retries: \d+, retry_timeout: \S+)?(?=\s+-)"
)
_used_by: int | None = None  # the process in which the threads of obstore run


@dataclass(frozen=True)
class _Clients:
    """Two clients. `quick`: an answer within seconds, or another try.

    `patient`: for uploads, which are answered only when all is sent.
    """

    quick: S3Store
    patient: S3Store


class Entry(NamedTuple):
    """An object as the server lists it. `tag` changes with its content."""

    key: str
    bytes: int
    tag: str


class Bucket:
    """The objects below a prefix of a bucket, as a flat map of keys to bytes.

    Every error is an OSError, raised as late as rlpipe/store/patience.py says; FileNotFoundError
    for an object that does not exist.
    """

    parts_at_once = PARTS

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._opened: _Clients | None = None
        self._lock = threading.Lock()

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        return self.entry(key).bytes

    def entry(self, key: str) -> Entry:
        return self._entry(self._ask(key, lambda: obstore.head(self._clients().quick, self._path(key))))

    def entries(self, prefix: str) -> list[Entry]:
        """All objects below a prefix, in any order; an empty prefix: of the bucket."""
        below = self._path(prefix) if prefix else self._prefix or None
        return [
            self._entry(meta)
            for meta in self._ask(prefix, lambda: obstore.list(self._clients().quick, below).collect())
        ]

    def _entry(self, meta: ObjectMeta) -> Entry:
        return Entry(self._key(meta["path"]), meta["size"], meta["e_tag"] or str(meta["last_modified"]))

    def read(self, key: str) -> bytes:
        def ask() -> tuple[int, bytes | None]:
            result = obstore.get(self._clients().quick, self._path(key))
            size = result.meta["size"]
            return size, bytes(result.bytes()) if size <= PART_BYTES else None

        size, data = self._ask(key, ask)
        return b"".join(parts_ahead(functools.partial(self.read_part, key), 0, size, PARTS)) if data is None else data

    def read_part(self, key: str, start: int, end: int) -> memoryview:
        """The bytes `start` to `end` of an object; fewer when it ends before."""

        def ask() -> memoryview:
            return memoryview(obstore.get_range(self._clients().quick, self._path(key), start=start, end=end))

        try:
            return self._ask(key, ask)
        except OSError as error:
            if " 416 " in str(error.strerror):  # it ends before `start`
                return memoryview(b"")
            raise

    def copy_part(self, key: str, start: int, end: int, descriptor: int) -> int:
        """Writes a part to the same place of an open file, as it arrives.

        Returns the position where it ended, which is before `end` when the object is shorter.
        """

        def ask() -> int:
            at, result = start, obstore.get(self._clients().quick, self._path(key), options={"range": (start, end)})
            for piece in result.stream(min_chunk_size=PIECE_BYTES):
                at = write_at(descriptor, piece, at)
            return at

        return self._ask(key, ask)

    def put(self, key: str, data: bytes) -> None:
        if len(data) > PART_BYTES:
            view = memoryview(data)
            pieces = [view[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
            self.put_parts(key, len(data), lambda: pieces)
            return
        self._ask(key, lambda: obstore.put(self._client_for(data), self._path(key), data, use_multipart=False))

    def put_parts(self, key: str, size: int, pieces: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Sends pieces of any size in parts, PARTS at the same time; `pieces` yields them from the
        first on at each try. The object becomes visible as a whole, when the last part has arrived.
        """
        part_bytes = max(PART_BYTES, -(-size // PARTS_MAX))
        assert part_bytes * PARTS_MAX >= size, f"{key}: {size} bytes"

        def ask() -> None:
            obstore.put(
                self._clients().patient, self._path(key), iter(pieces()),
                use_multipart=True, chunk_size=part_bytes, max_concurrency=PARTS,
            )  # fmt: skip

        try:
            self._ask(key, ask)
        except FileNotFoundError:
            # the upload is over, though no answer came: a first request to complete
            # it did, and its answer was lost
            if not self.exists(key) or self.size(key) != size:
                raise

    def create(self, key: str, data: bytes) -> bool:
        """Creates `key`; True when this call created it, or a try of it whose answer was lost.

        The next try then finds the key, with equal bytes: so equal bytes count as created here.
        """

        def ask() -> bool:
            try:
                with self._faults(key):
                    obstore.put(self._client_for(data), self._path(key), data, mode="create", use_multipart=False)
                return True
            except FileExistsError as error:
                refused = error
            try:
                return self.read(key) == data
            except FileNotFoundError:  # another creator was refused at the same moment
                raise Passing(refused.errno, refused.strerror, refused.filename) from None

        return self._ask(key, ask)

    def list(self, prefix: str) -> list[str]:
        return [entry.key for entry in self.entries(prefix)]

    def folders(self, prefix: str) -> list[str]:
        entries = self._ask(prefix, lambda: obstore.list_with_delimiter(self._clients().quick, self._path(prefix)))
        return [path.rsplit("/", 1)[-1] for path in entries["common_prefixes"]]

    def delete(self, key: str) -> None:
        self._ask(key, lambda: obstore.delete(self._clients().quick, self._path(key)))

    def check_writable(self, key: str) -> None:
        """OSError when `key` could not be created. Writes nothing that stays."""
        self.put(key, b"probe")
        self.delete(key)

    def _ask(self, key: str, ask: Callable[[], Answer]) -> Answer:
        """Returns the answer of a call of obstore. Every call is made here, with retries for as
        long as this process waits for a server.
        """
        return persistently(self._address(key), self._faults(key)(ask))

    @contextlib.contextmanager
    def _faults(self, key: str) -> Iterator[None]:
        """Turns obstore's errors into OSErrors with a short text that names the object; Passing for
        a fault that another try may not have.
        """
        try:
            yield
        except (BaseError, BotoCoreError, FileNotFoundError, ValueError) as error:  # ValueError: no key of S3
            if isinstance(error, OSError) and error.errno:  # it is one of ours
                raise
            raise _as_oserror(error, self._address(key)) from None

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _address(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._path(key)}"

    def _key(self, path: str) -> str:
        return path.removeprefix(f"{self._prefix}/") if self._prefix else path

    def _client_for(self, data: bytes) -> S3Store:
        return self._clients().quick if len(data) <= SMALL_BYTES else self._clients().patient

    def _clients(self) -> _Clients:
        """The clients, made when they are first needed."""
        _check_process(self._path(""))
        with self._lock:
            self._opened = self._opened or _open(self._bucket)
        return self._opened


class _Keys:
    """Gives obstore the keys that botocore found, and new ones before they expire."""

    def __init__(self, session: Session) -> None:
        credentials = session.get_credentials()
        if credentials is None:
            raise PermissionError(
                errno.EACCES,
                "no keys: neither AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, nor a profile, nor a role of this"
                " machine",
            )
        self._credentials: Any = credentials

    def __call__(self) -> S3Credential:
        keys = self._credentials.get_frozen_credentials()
        check_key(keys.access_key, keys.token or "")
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + KEYS,
        }


def _open(bucket: str) -> _Clients:
    session = Session()
    keys, endpoint = _Keys(session), _endpoint(session)
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
    check_address(bucket, endpoint, region)
    plain = endpoint is not None and endpoint.startswith("http://")
    options: ClientConfig = {"connect_timeout": CONNECT, "timeout": PART, "allow_http": plain}
    if certificates := session.get_config_variable("ca_bundle"):
        options["root_certificate"] = Path(certificates).read_bytes()
    # TLS protects the transfer: it needs no sha256 of its own
    config: S3Config = {"region": region, "unsigned_payload": not plain}
    if endpoint:
        config["endpoint"] = endpoint

    def client(options: ClientConfig, retries: RetryConfig) -> S3Store:
        return S3Store(bucket, config=config, client_options=options, retry_config=retries, credential_provider=keys)

    return _Clients(quick=client({**options, "read_timeout": SILENCE}, RETRY), patient=client(options, RETRY_PARTS))


def _endpoint(session: Session) -> str | None:
    """The address of an S3 server other than Amazon's, looked up in the order of AWS tools."""
    profile = session.get_scoped_config()
    service = session.full_config.get("services", {}).get(profile.get("services"), {}).get("s3", {})
    configured = (service.get("endpoint_url"), profile.get("endpoint_url"))
    return next(
        filter(None, (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"), *configured)), None
    )


def _check_process(address: str) -> None:
    """OSError in a process that was forked after obstore was used: obstore's threads do not exist
    there, and a call would wait for ever.
    """
    global _used_by
    if _used_by not in (None, os.getpid()):
        raise OSError(
            errno.ENOTSUP, "this process was forked from one that used S3; start it by exec or spawn", address
        )
    _used_by = os.getpid()


def _as_oserror(error: Exception, address: str) -> OSError:
    """The same fault as an OSError.

    Its kind follows from the server's answer; for a listing, obstore gives that in the text only.
    """
    text, _, debug = str(error).partition("\n\nDebug source")
    status = re.search(r"status code: (\d{3})", text)
    causes = re.findall(r'message: "([^"]+)"', debug) or re.findall(r"HttpError {\s+kind: (\w+)", debug)
    reason = " ".join([*_NOISE.sub("", text).split(), *(f"({cause})" for cause in causes[-1:])])
    if "NoSuchBucket" in reason:
        return OSError(errno.EIO, "this bucket does not exist", address)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, reason, address)
    if isinstance(error, AlreadyExistsError):
        return FileExistsError(errno.EEXIST, reason, address)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or " 403 " in reason:
        return PermissionError(errno.EACCES, reason, address)
    passes = isinstance(error, NO_ANSWER) or "HttpError {" in debug or "Server returned error response" in text
    if status is not None:
        # as S3 says 408
        passes = int(status[1]) in PASSING_STATUSES or (int(status[1]) == 400 and "RequestTimeout" in reason)
    return (Passing if passes and "builder error" not in text else OSError)(errno.EIO, reason, address)
