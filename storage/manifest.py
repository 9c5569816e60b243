"""Describe what a step committed: files, artifacts and the manifest that names them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from storage import layout
from storage.errors import CorruptArtifactError, StepFailedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class File:
    """Name a Parquet file by its key in the store, with what a reader checks before use."""

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """Name a table of a declared schema; `digest` is over its rows in order, not its files' bytes."""

    name: str
    rows: int
    digest: str
    schema_version: int
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Name the files of one committed shard, one for each artifact."""

    index: int
    files: Mapping[str, File]
    counts: Mapping[str, Any]
    nonce: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Record a committed attempt of a step.

    `inputs` maps names to digests, `key_parts` is what the key was hashed from, `counts` is
    `{"in": n, "kept": n, "dropped": {reason: n}}` or empty, `facts` is JSON: small results, and how they came to be.
    """

    key: str
    attempt: int
    step: str
    version: int
    inputs: Mapping[str, Any]
    key_parts: Mapping[str, Any]
    artifacts: Mapping[str, Artifact]
    counts: Mapping[str, Any]
    facts: Mapping[str, Any]
    nonce: str
    created: str

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Give the digests of the weights that a step says to have made (`facts.model`)."""
        model = self.facts.get("model", {})
        return tuple(one for one in (model.get("base"), model.get("adapter")) if one is not None)

    def artifact(self, name: str) -> Artifact:
        """Return an artifact by name, or raise StoreError naming those there are."""
        if name not in self.artifacts:
            raise StoreError(
                f"step {self.step} ({self.key}) has no artifact {name!r}, only {', '.join(self.artifacts) or 'none'}"
            )
        return self.artifacts[name]


def check_counts(counts: Mapping[str, Any], where: str) -> None:
    """Raise StepFailedError unless rows in = rows kept + rows dropped; empty counts claim nothing."""
    if not counts:
        return
    if not {"in", "kept"} <= set(counts) <= {"in", "kept", "dropped"}:
        raise StepFailedError(f"{where}: counts have 'in', 'kept' and 'dropped', not {sorted(counts)}; mend the step")
    dropped = sum(counts.get("dropped", {}).values())
    if counts["in"] != counts["kept"] + dropped:
        raise StepFailedError(
            f"{where}: {counts['in']} rows came in but {counts['kept']} were kept and {dropped} dropped; report "
            "this as a bug"
        )


def manifest_fields(manifest: Manifest) -> dict[str, Any]:
    """Return the fields of a manifest's record."""
    return asdict(manifest)


def parse_manifest(fields: Mapping[str, Any], *, key: str, attempt: int, address: str) -> Manifest:
    """Build a manifest from its record; one of another key or with foreign paths raises CorruptArtifactError."""
    try:
        artifacts = {name: _artifact(name, value) for name, value in fields["artifacts"].items()}
        manifest = Manifest(**{**fields, "artifacts": artifacts})
    except (TypeError, KeyError, AttributeError) as error:
        raise CorruptArtifactError(
            f"{address} is not a manifest ({error}); void it and compute the step again"
        ) from None
    _check_paths((file for artifact in artifacts.values() for file in artifact.files), key, attempt, address=address)
    if (manifest.key, manifest.attempt) != (key, attempt):
        raise CorruptArtifactError(
            f"{address} is the manifest of {manifest.key}/{manifest.attempt}; void it and compute the step again"
        )
    return manifest


def shard_fields(record: ShardRecord) -> dict[str, Any]:
    """Return the fields of a shard's record."""
    return asdict(record)


def parse_shard(fields: Mapping[str, Any], *, key: str, attempt: int, address: str) -> ShardRecord:
    """Build a shard record; one with foreign paths raises CorruptArtifactError."""
    try:
        record = ShardRecord(**{**fields, "files": {name: File(**value) for name, value in fields["files"].items()}})
    except (TypeError, KeyError, AttributeError) as error:
        raise CorruptArtifactError(
            f"{address} is not a shard record ({error}); void the attempt and compute it again"
        ) from None
    _check_paths(record.files.values(), key, attempt, address=address)
    return record


def _artifact(name: str, value: Mapping[str, Any]) -> Artifact:
    if value["name"] != name:
        raise KeyError(name)
    return Artifact(**{**value, "files": tuple(File(**file) for file in value["files"])})


def _check_paths(files: Iterable[File], key: str, attempt: int, *, address: str) -> None:
    """Keep a record from sending its reader outside its own attempt."""
    for file in files:
        layout.digest(file.sha256)
        if not layout.key(file.path).startswith(layout.attempt(key, attempt)):
            raise CorruptArtifactError(
                f"{address} names {file.path} outside its attempt; void it and compute the step again"
            )
