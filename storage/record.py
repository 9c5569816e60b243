"""Spell the store's JSON records so that a changed byte is noticed and an unknown format is refused.

A record is canonical JSON with two fields of its own: `format`, and `sha256` over the canonical JSON of all other
fields.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from storage.digest import canonical_json, digest_json
from storage.errors import CorruptArtifactError, StepFailedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from storage.backend import Backend

FORMAT_VERSION = 1
READ_TRIES = 5
READ_PAUSE_S = 0.05


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes of a record; fields that JSON can't carry exactly (NaN, objects) raise StepFailedError."""
    try:
        body = json.loads(canonical_json({**fields, "format": FORMAT_VERSION}))
    except (TypeError, ValueError) as error:
        raise StepFailedError(
            f"a record of the store can't hold these fields: {error}; give finite numbers, text, lists"
        ) from error
    return canonical_json({**body, "sha256": digest_json(body)})


def decode(data: bytes, address: str) -> dict[str, Any]:
    """Return the fields of a record; raises CorruptArtifactError for damage, StoreError for a newer format."""
    try:
        body = json.loads(data)
        found = body.pop("sha256")
        expected = digest_json(body)
        version = body.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptArtifactError(f"{address} is not a record of this store; restore the object") from None
    if found != expected:
        raise CorruptArtifactError(f"{address} has digest {expected} instead of {found}; restore the object")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise StoreError(
            f"{address} is of format {version}, this starwheel reads up to {FORMAT_VERSION}; install a newer starwheel"
        )
    fields: dict[str, Any] = body
    return fields


def read(backend: Backend, key: str) -> tuple[dict[str, Any], bytes]:
    """Return a record and its bytes; what arrives damaged is read again, then CorruptArtifactError is raised."""
    for tried in range(1, READ_TRIES + 1):
        data = backend.get(key)
        try:
            return decode(data, backend.address(key)), data
        except CorruptArtifactError:
            if tried == READ_TRIES:
                raise
            time.sleep(READ_PAUSE_S * tried)
    raise AssertionError("unreachable")
