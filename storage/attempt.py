"""Write one attempt of a step: shard plan, shard records and, last, the manifest.

Payload first, pointer last; the first writer of a pointer wins and the others adopt it.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from storage import failpoint, layout, manifest, record, tables
from storage.backend import NotFoundError
from storage.digest import TableDigest, digest_file, digest_json
from storage.errors import CorruptArtifactError, StepFailedError
from storage.manifest import Artifact, File, Manifest, ShardRecord
from storage.schema import SCHEMA_VERSION, SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from storage.backend import Backend
    from storage.cache import ObjectCache

# Bigger files are checked by size and by the server's part digests; reading them back would double the traffic of a
# long commit.
READ_BACK_BYTES = 256 << 20
_READERS = 16


@dataclass(frozen=True, slots=True)
class Shard:
    """Name the range `[start, stop)` of the sorted ids that is computed and committed as one."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Attempt:
    """Write attempt `number` of the step `key`; threads, processes and machines may call every method at once."""

    key: str
    number: int
    backend: Backend
    cache: ObjectCache

    def plan(self, ids: Sequence[str], shard_size: int) -> list[Shard]:
        """Cut the sorted ids into shards; a plan that is in force wins, whatever its shard size.

        Raises StepFailedError for repeated ids and where the plan in force is for other ids.
        """
        if len(set(ids)) != len(ids):
            raise StepFailedError(f"the ids to plan for step {self.key} repeat; mend the step that makes them")
        digest = digest_json(sorted(ids))
        bounds = [[start, min(start + shard_size, len(ids))] for start in range(0, len(ids), shard_size)]
        where = layout.plan(self.key, self.number)
        self.backend.put_new(where, record.encode({"ids": digest, "shards": bounds}))
        fields, _ = record.read(self.backend, where)
        if fields["ids"] != digest:
            raise StepFailedError(
                f"{self.backend.address(where)} plans other ids than the {len(ids)} given; `starwheel void "
                f"{self.key}` and run again"
            )
        return [Shard(index, start, stop) for index, (start, stop) in enumerate(fields["shards"])]

    def shards(self, plan: Sequence[Shard]) -> dict[int, ShardRecord]:
        """Return the shards of the plan that are committed, by index."""
        with ThreadPoolExecutor(_READERS) as pool:
            found = pool.map(self._shard, [shard.index for shard in plan])
        return {shard.index: shard for shard in found if shard is not None}

    def commit_shard(self, index: int, tables: Mapping[str, pa.Table], counts: Mapping[str, Any]) -> ShardRecord:
        """Store the tables of a shard, then its record; if another worker's record is there first, return that one."""
        manifest.check_counts(counts, f"shard {index} of step {self.key}")
        files = {name: self._store(name, table, index)[0] for name, table in tables.items()}
        mine = ShardRecord(index=index, files=files, counts=counts, nonce=secrets.token_hex(16))
        failpoint.hit(f"commit_shard {self.key} {index} payload stored")
        self.backend.put_new(layout.shard(self.key, self.number, index), record.encode(manifest.shard_fields(mine)))
        stored = self._shard(index)
        if stored is None:
            raise CorruptArtifactError(
                f"{self.backend.address(layout.shard(self.key, self.number, index))} vanished; check the store"
            )
        return stored

    def commit(
        self,
        *,
        step: str,
        version: int,
        inputs: Mapping[str, Any],
        key_parts: Mapping[str, Any],
        counts: Mapping[str, Any],
        facts: Mapping[str, Any],
        tables: Mapping[str, pa.Table] | None = None,
        shards: Sequence[ShardRecord] | None = None,
    ) -> Manifest:
        """Commit the attempt: store the tables, join the shards, then write the manifest by exclusive create.

        Return the manifest in force: this one, or another writer's that was first. Raises StepFailedError where the
        counts don't add up, shards of the plan are missing or the attempt was voided meanwhile; CommitUnknownError
        where the store fell silent.
        """
        manifest.check_counts(counts, f"step {step} ({self.key})")
        artifacts = {name: self._single(name, table) for name, table in (tables or {}).items()}
        if shards is not None:
            artifacts |= self._joined(sorted(shards, key=lambda shard: shard.index))
        mine = Manifest(
            key=self.key,
            attempt=self.number,
            step=step,
            version=version,
            inputs=inputs,
            key_parts=key_parts,
            artifacts=artifacts,
            counts=counts,
            facts=facts,
            nonce=secrets.token_hex(16),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        failpoint.hit(f"commit {self.key} payload stored")
        self.backend.put_new(layout.manifest(self.key, self.number), record.encode(manifest.manifest_fields(mine)))
        stored = self.read_manifest()
        if stored is None or self.is_void():
            raise StepFailedError(
                f"attempt {self.number} of step {step} ({self.key}) was voided meanwhile; resume to compute the next"
            )
        return stored

    def read_manifest(self) -> Manifest | None:
        """Return the manifest of this attempt, None where it isn't committed; it may be void all the same."""
        where = layout.manifest(self.key, self.number)
        try:
            fields, _ = record.read(self.backend, where)
        except NotFoundError:
            return None
        return manifest.parse_manifest(fields, key=self.key, attempt=self.number, address=self.backend.address(where))

    def is_void(self) -> bool:
        """Say whether the attempt no longer counts."""
        return self.backend.size(layout.void(self.key, self.number)) is not None

    def void(self, reason: str, who: str) -> None:
        """Mark the attempt as void for good; a mark that is there already stays."""
        words = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "nonce": secrets.token_hex(16)}
        self.backend.put_new(layout.void(self.key, self.number), record.encode({"reason": reason, "who": who, **words}))

    def _shard(self, index: int) -> ShardRecord | None:
        where = layout.shard(self.key, self.number, index)
        try:
            fields, _ = record.read(self.backend, where)
        except NotFoundError:
            return None
        return manifest.parse_shard(fields, key=self.key, attempt=self.number, address=self.backend.address(where))

    def _store(self, artifact: str, table: pa.Table, index: int) -> tuple[File, str]:
        """Write and verify a file locally, store it, and return it with the digest of its rows."""
        with self.cache.scratch() as folder:
            local = folder / "part.parquet"
            digest = tables.write_table(local, table, artifact)
            failpoint.hit(f"write {self.key} {artifact} {index} verified")
            file = self._upload(local, artifact, index, rows=table.num_rows)
        return file, digest

    def _upload(self, local: Path, artifact: str, index: int, *, rows: int) -> File:
        sha256, size = digest_file(local), local.stat().st_size
        where = layout.part(self.key, self.number, artifact, index=index, sha256=sha256)
        self.backend.put_file(where, local, sha256=sha256, read_back=size <= READ_BACK_BYTES)
        self.cache.adopt(local, sha256)
        return File(path=where, rows=rows, bytes=size, sha256=sha256)

    def _single(self, name: str, table: pa.Table) -> Artifact:
        file, digest = self._store(name, table, 0)
        return Artifact(name=name, rows=file.rows, digest=digest, schema_version=SCHEMA_VERSION, files=(file,))

    def _joined(self, shards: Sequence[ShardRecord]) -> dict[str, Artifact]:
        """Join the shards of the plan, which must all be there, into artifacts in the order of the plan."""
        fields, _ = record.read(self.backend, layout.plan(self.key, self.number))
        if [shard.index for shard in shards] != list(range(len(fields["shards"]))):
            raise StepFailedError(
                f"step {self.key} has {len(shards)} of {len(fields['shards'])} shards; resume to compute the others"
            )
        names = {name for shard in shards for name in shard.files}
        if any(set(shard.files) != names for shard in shards):
            raise StepFailedError(f"shards of step {self.key} lack some of {sorted(names)}; report this as a bug")
        return {name: self._join(name, [shard.files[name] for shard in shards]) for name in sorted(names)}

    def _join(self, name: str, files: Sequence[File]) -> Artifact:
        total = TableDigest(SCHEMAS[name])
        for table in read_files(self.backend, self.cache, name, files):
            total.update(table)
        rows = sum(file.rows for file in files)
        return Artifact(
            name=name, rows=rows, digest=total.hexdigest(), schema_version=SCHEMA_VERSION, files=tuple(files)
        )


def read_files(
    backend: Backend, cache: ObjectCache, artifact: str, files: Sequence[File], *, columns: list[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the verified tables of an artifact's files, one at a time; damage raises CorruptArtifactError."""
    for file in files:
        path = cache.fetch(backend, file.path, sha256=file.sha256, size=file.bytes)
        table = tables.read_table(path, artifact, columns)
        if table.num_rows != file.rows:
            raise CorruptArtifactError(
                f"{backend.address(file.path)} holds {table.num_rows} rows instead of {file.rows}; void its step "
                "and compute it again"
            )
        yield table
