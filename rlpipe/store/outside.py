"""Files on S3 that belong to no store: data sets, and folders of models.

Endpoint and keys are found as those of a store on S3.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rlpipe.base.errors import StoreError, UserError
from rlpipe.base.hashing import sha256_of
from rlpipe.base.references import is_key
from rlpipe.base.values import size_text
from rlpipe.store.artifacts import file_sha256
from rlpipe.store.transfer import PART_BYTES, Part, RangeFile, parts_ahead

if TYPE_CHECKING:
    from rlpipe.store.s3 import Bucket

log = logging.getLogger(__name__)
SCHEME = "s3://"
FETCHED = ".fetched.json"  # beside files that were fetched: name -> the sha256 that each had then
_verified: set[Path] = set()  # folders whose files have these hashes, checked once a process


@dataclass(frozen=True)
class OutsideFile:
    """An object of a bucket.

    `name`: its path below the folder that was listed. `tag` changes with its content.
    """

    bucket: Bucket
    address: str
    key: str
    name: str
    bytes: int
    tag: str

    def open(self) -> OutsideReader:
        return OutsideReader(self)

    def parts(self, start: int) -> Iterator[Part]:
        """The bytes from `start` on, in order, with several parts read ahead; StoreError when the
        object ends before its size.
        """

        def whole(first: int, last: int) -> Part:
            part = self.bucket.read_part(self.key, first, last)
            if len(part) != last - first:
                raise StoreError(f"{self.address} was changed while it was read: it ends before byte {last}")
            return part

        yield from parts_ahead(whole, start, self.bytes, self.bucket.parts_at_once)


class OutsideReader(io.BufferedReader):
    """An object as a file: only the ranges that are read are requested.

    `fault`: the OSError that ended a read, even if another error was raised from it.
    """

    def __init__(self, file: OutsideFile) -> None:
        self._file = file
        self.fault: OSError | None = None
        super().__init__(RangeFile(self._read_part, file.bytes), PART_BYTES)

    def _read_part(self, start: int, end: int) -> Part:
        try:
            return self._file.bucket.read_part(self._file.key, start, end)
        except OSError as error:
            self.fault = error
            raise


def is_outside(name: str) -> bool:
    return name.startswith(SCHEME)


def outside_files(field: str, url: str) -> list[OutsideFile]:
    """The object that an s3:// URL names, or all below it, by name; empty when there is none.

    UserError, which names the field, when the URL is not valid, or the bucket cannot be read.
    """
    from rlpipe.store.s3 import Bucket  # it takes 0.3 s

    name, _, path = url.removeprefix(SCHEME).partition("/")
    path, is_folder = path.rstrip("/"), path.endswith("/")
    if not name or (path and not is_key(path)) or set(url) & set("?#*"):
        raise UserError(
            f"{field}={url!r}: write it as s3://bucket/path, without '?', '#' and '*'; a folder stands for all files"
            " in it"
        )
    bucket = Bucket(name, "")
    try:
        if path and not is_folder:
            with contextlib.suppress(FileNotFoundError):
                entry = bucket.entry(path)
                return [OutsideFile(bucket, url, path, path.rsplit("/", 1)[-1], entry.bytes, entry.tag)]
        below = f"{path}/" if path else ""
        entries = [
            entry for entry in bucket.entries(path) if entry.key.startswith(below) and not entry.key.endswith("/")
        ]
    except OSError as error:
        raise UserError(
            f"{field}={url!r}: cannot be read ({error}); check the bucket, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY (docs/store.md)"
        ) from error
    return [
        OutsideFile(
            bucket, f"{SCHEME}{name}/{entry.key}", entry.key, entry.key.removeprefix(below), entry.bytes, entry.tag
        )
        for entry in sorted(entries)
    ]


def files_text(files: Sequence[OutsideFile]) -> str:
    """Text with the number of files and their total size. Example: 3 files, 269.1 MB."""
    return f"{len(files)} file{'s' * (len(files) != 1)}, {size_text(sum(file.bytes for file in files))}"


def fetched_folder(url: str, files: Sequence[OutsideFile], below: Path) -> Path:
    """The folder in which `fetch_files` puts these files: it follows from their names, sizes and
    tags.
    """
    digest = sha256_of([[file.name, file.bytes, file.tag] for file in files])
    return below / f"{url.rstrip('/').rsplit('/', 1)[-1]}-{digest[:12]}"


def fetch_files(field: str, url: str, files: Sequence[OutsideFile], below: Path) -> Path:
    """Fetches the files of a folder on S3, none of them in a subfolder, into a local folder below
    `below`; returns its path.

    A file that is there already, complete and with the sha256 that it was fetched with, is not
    fetched again; a partial file is completed. One process fetches, others wait. UserError when the
    disk has not enough room.
    """
    folder = fetched_folder(url, files, below)
    assert all("/" not in file.name for file in files), f"{url}: a file in a folder of its own"
    if folder in _verified:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hashes = _hashes(folder)
        missing = [file for file in files if not _is_whole(folder / file.name, file, hashes)]
        size = sum(file.bytes - _partial_bytes(folder, file) for file in missing)
        if size > (free := shutil.disk_usage(folder).free):
            raise UserError(
                f"{field}={url!r}: {size_text(size)} are to be fetched, and {below} has {size_text(free)} left; set"
                " scratch to a folder on a larger disk"
            )
        if missing:
            log.warning("%s=%s: fetching %s, to %s", field, url, files_text(missing), folder)
        with tqdm(total=size, desc=url, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            for file in missing:
                hashes[file.name] = _fetch(folder, file, bar)
                (folder / FETCHED).write_text(json.dumps(hashes))
    _verified.add(folder)
    return folder


def _hashes(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / FETCHED).read_text()))
    except (OSError, ValueError, TypeError):  # no such document yet, or a cut one: the files are fetched again
        return {}


def _is_whole(path: Path, file: OutsideFile, hashes: dict[str, str]) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes and file_sha256(path) == hashes.get(file.name)


def _partial(folder: Path, file: OutsideFile) -> Path:
    return folder / f".{file.name}.partial"


def _partial_bytes(folder: Path, file: OutsideFile) -> int:
    path = _partial(folder, file)
    return size if path.is_file() and (size := path.stat().st_size) <= file.bytes else 0


def _fetch(folder: Path, file: OutsideFile, bar: tqdm[Any]) -> str:
    """Fetches the missing part of a file, which appears complete; returns its sha256."""
    partial, start = _partial(folder, file), _partial_bytes(folder, file)
    with partial.open("r+b" if start else "wb") as target:
        target.seek(start)
        for part in file.parts(start):
            target.write(part)
            bar.update(len(part))
    assert partial.stat().st_size == file.bytes, f"{partial} has not the size of {file.address}"
    sha256 = file_sha256(partial)
    partial.rename(folder / file.name)
    return sha256
