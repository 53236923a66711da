"""Data sets on S3: files and folders, read like those of a disk."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlpipe.base.errors import UserError
from rlpipe.data.rows import read_rows
from rlpipe.data.sources import load_prompts
from rlpipe.store.backend import open_store
from rlpipe.store.transfer import PART_BYTES
from tests.data.test_sources import config
from tests.s3_world import S3Proxy, S3Server


def parquet(*rows: Mapping[str, object]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), file, row_group_size=1)
    return file.getvalue()


def test_files_and_folders_on_s3_are_those_of_a_disk(s3_server: S3Server, tmp_path: Path) -> None:
    store = open_store(s3_server.url())
    asked = [{"prompt": f"{number}+2?", "answer": str(number + 2)} for number in range(6)]
    lines = [json.dumps(row).encode() for row in asked]
    files = {
        "rows.jsonl": b"\n".join(lines[:2]),  # no newline at its end
        "part/b.jsonl": lines[2] + b"\n\n" + lines[3] + b"\n",
        "part/a-0.parquet": parquet(*asked[4:]),
        "part/deeper/c.jsonl": lines[0],
        "part/_SUCCESS": b"x",
        "part-of-another/a.jsonl": lines[5],
        "spark.parquet/part-0.parquet": parquet(asked[1]),
    }
    for name, data in files.items():
        store.put(name, data)
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(data)
    expected = {
        "rows.jsonl": [0, 1],
        "part": [4, 5, 2, 3, 0],
        "part/": [4, 5, 2, 3, 0],
        "part/a-0.parquet": [4, 5],
        "spark.parquet": [1],
    }
    for name, numbers in expected.items():
        for place in (store.url, str(tmp_path)):
            rows = read_rows(config(f"{place}/{name}"), 0)
            assert [row.values for row in rows] == [asked[number] for number in numbers], (place, name)
            assert all(row.where.startswith(f"{place}/{name.strip('/')}") for row in rows)
    assert read_rows(config(f"{store.url}/part"), 0)[2].where == f"{store.url}/part/b.jsonl:1"
    assert len(load_prompts(config(f"{store.url}/part", rows_max=3), seed=0)) == 3


@pytest.mark.slow
def test_of_a_large_file_on_s3_what_is_asked_for_is_read(s3_server: S3Server, s3_proxy: S3Proxy) -> None:
    store, filler = open_store(s3_server.url()), random.Random(0).randbytes(PART_BYTES).hex()
    rows = [{"prompt": f"{number}", "answer": "1", "filler": filler} for number in range(4)]
    store.put("rows.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    store.put("rows.parquet", parquet(*rows))
    s3_proxy.requests.clear()
    assert len(read_rows(config(f"{store.url}/rows.jsonl", rows_max=1), 0)) == 1
    assert sum(request.answered_bytes for request in s3_proxy.requests) < store.size("rows.jsonl") * 3 // 4
    assert [row.values for row in read_rows(config(f"{store.url}/rows.parquet"), 0)] == rows


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("none.jsonl", "there is no such file or folder in the bucket"),
        ("none", "there is no such file or folder in the bucket"),
        ("other", r"no file that ends in \.jsonl or \.parquet \(there: a\.csv\)"),
        ("bad.jsonl", r"bad\.jsonl:2: not JSON"),
        ("bad.parquet", r"bad\.parquet: not a readable Parquet file"),
        ("empty.jsonl", "it has no rows"),
        ("*.jsonl", "a folder stands for all files in it"),
        ("../x.jsonl", "write it as s3://bucket/path"),
    ],
)
def test_what_cannot_be_read_of_s3_is_named(s3_server: S3Server, path: str, said: str) -> None:
    store = open_store(f"s3://{s3_server.bucket}/read")
    broken = {"other/a.csv": b"a", "bad.jsonl": b'{"prompt": "x"}\n{', "bad.parquet": b"PAR1", "empty.jsonl": b"\n"}
    for name, data in broken.items():
        store.put(name, data)
    with pytest.raises(UserError, match=rf"(data\.mine\.source=|{store.url}/).*{said}"):
        read_rows(config(f"{store.url}/{path}"), 0)


def fails(bucket: object, key: str, start: int, end: int) -> bytes:
    raise OSError(5, "the line is dead", key)


def test_a_bucket_that_cannot_be_read_is_refused_and_a_dead_line_is_no_fault_of_the_file(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_server.url())
    store.put("rows.parquet", parquet({"prompt": "2+2?"}))
    with pytest.raises(
        UserError, match=r"data\.mine\.source='?s3://nobucket/x\.jsonl'?: (cannot be read|there is no such)"
    ):
        read_rows(config("s3://nobucket/x.jsonl"), 0)
    with monkeypatch.context() as dead:
        dead.setattr("rlpipe.store.s3.Bucket.read_part", fails)
        with pytest.raises(OSError, match="the line is dead"):
            read_rows(config(f"{store.url}/rows.parquet"), 0)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(UserError, match=r"cannot be read .*check the bucket, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID"):
        read_rows(config(f"{store.url}/rows.parquet"), 0)


def test_a_local_folder_is_its_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file that ends in \.jsonl or \.parquet \(there: nothing\)"):
        read_rows(config(tmp_path), 0)
    with pytest.raises(UserError, match=r"no such kind of source.*a folder of such, here or as s3://bucket/path"):
        read_rows(config(tmp_path / "none"), 0)
