"""Check what lies in a store, using nothing of `storage/`: records, chains, files, digests and nothing else."""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

if TYPE_CHECKING:
    from conftest import Raw

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_KEYS = re.compile(
    rf"FORMAT\.json|runs/{_NAME}/(run\.json|log/\d{{8}}\.json|lease/\d+\.json)"
    rf"|steps/{_NAME}/\d+/(plan|manifest|void)\.json|steps/{_NAME}/\d+/shards/\d{{5}}\.json"
    rf"|steps/{_NAME}/claim\.json|refs/{_NAME}/\d{{8}}\.json|gc/{_NAME}\.json"
    rf"|probe/[0-9a-f]{{16}}/{_NAME}"  # left by a kill while a new store was probed; garbage
    rf"|steps/{_NAME}/\d+/[a-z_]+/part-\d{{5}}-[0-9a-f]{{64}}\.parquet|checkpoints/[0-9a-f]{{64}}/{_NAME}"
)


@dataclass
class Audit:
    """Count what was found whole."""

    manifests: dict[str, Any] = field(default_factory=dict)
    files: int = 0
    log_records: int = 0
    checkpoints: int = 0


def audit(raw: Raw) -> Audit:
    """Assert what a store promises: names tell their bytes, manifests name whole files, logs are chained."""
    found = Audit()
    keys = [key for key in raw.listing() if not any(part.startswith(".") for part in key.split("/"))]
    foreign = [key for key in keys if not _KEYS.fullmatch(key)]
    assert foreign == []
    for key in keys:
        if key.endswith("/manifest.json"):
            found.manifests[key] = _manifest(raw, key, found)
        elif key.endswith(".parquet"):
            assert _sha(raw.read(key)) == key[-72:-8], f"{key} does not hold what its name says"
        elif key.startswith("checkpoints/") and key.endswith("/index.json"):
            _checkpoint(raw, key)
            found.checkpoints += 1
    for run in {key.split("/")[1] for key in keys if "/log/" in key}:
        found.log_records += _log(raw, sorted(key for key in keys if key.startswith(f"runs/{run}/log/")))
    return found


def _record(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(data)
    told = fields.pop("sha256")
    spelt = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert _sha(spelt) == told
    return fields


def _manifest(raw: Raw, key: str, found: Audit) -> dict[str, Any]:
    fields = _record(raw.read(key))
    for artifact in fields["artifacts"].values():
        for file in artifact["files"]:
            data = raw.read(file["path"])
            assert (len(data), _sha(data)) == (file["bytes"], file["sha256"]), file["path"]
            assert pq.read_metadata(io.BytesIO(data)).num_rows == file["rows"]
            found.files += 1
        assert sum(file["rows"] for file in artifact["files"]) == artifact["rows"]
    return fields


def _checkpoint(raw: Raw, key: str) -> None:
    index = raw.read(key)
    assert _sha(index) == key.split("/")[1]
    for file in json.loads(index)["files"]:
        assert _sha(raw.read(f"{key.removesuffix('index.json')}{file['name']}")) == file["sha256"]


def _log(raw: Raw, keys: list[str]) -> int:
    before, epoch, nonces = "0" * 64, 1, set()
    for seq, key in enumerate(keys):
        data = raw.read(key)
        fields = _record(data)
        assert key.endswith(f"/{seq:08d}.json")
        assert fields["seq"] == seq
        assert fields["prev"] == before
        assert fields["epoch"] >= epoch
        nonces.add(fields["nonce"])
        before, epoch = _sha(data), fields["epoch"]
    assert len(nonces) == len(keys)
    return len(keys)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
