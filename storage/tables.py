"""Write and read the Parquet files of artifacts: declared schema, checksummed pages, verified before use."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.digest import digest_table
from storage.errors import CorruptArtifactError, StepFailedError, StoreError
from storage.schema import SCHEMAS

ROW_GROUP_BYTES = 128 << 20
_MAX_GROUP_ROWS = 1 << 20


def write_table(path: str | Path, table: pa.Table, artifact: str) -> str:
    """Write a table as the declared schema of its kind and return the digest of its content.

    The file is closed, opened again and compared with the table before it takes its name, so an exception on the way
    leaves nothing at `path`. Raises StepFailedError where the columns aren't those declared, StoreError where the disk
    refuses.
    """
    table = conform(table, artifact)
    target = Path(path)
    temporary = target.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(6)}")
    digest = digest_table(table)
    try:
        _write(temporary, table)
        if digest_table(_read(temporary, artifact, None)) != digest:
            raise CorruptArtifactError(f"{target} doesn't read back as it was written; check the disk")
        os.replace(temporary, target)
    except (StoreError, StepFailedError):
        raise
    except OSError as error:
        raise StoreError(
            f"can't write {target}: {error.strerror or error}; free space or choose another cache folder"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return digest


def read_table(path: str | Path, artifact: str, columns: list[str] | None = None) -> pa.Table:
    """Read an artifact's file (or some of its columns) in the declared types; page checksums are verified."""
    try:
        return _read(Path(path), artifact, columns)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptArtifactError(
            f"{path} can't be read as {artifact}: {reason}; fetch or compute it again"
        ) from error


def conform(table: pa.Table, artifact: str) -> pa.Table:
    """Return the table in the declared order and types of its kind; a column of nulls keeps the declared type."""
    schema = _schema(artifact)
    if set(table.column_names) != set(schema.names):
        extra = sorted(set(table.column_names) - set(schema.names))
        lost = sorted(set(schema.names) - set(table.column_names))
        raise StepFailedError(
            f"artifact {artifact} has undeclared columns {extra} and lacks {lost}; mend the step that makes it"
        )
    try:
        return table.select(schema.names).replace_schema_metadata(None).cast(schema)
    except pa.ArrowException as error:
        raise StepFailedError(
            f"artifact {artifact} doesn't fit its declared types: {error}; mend the step that makes it"
        ) from error


def _write(path: Path, table: pa.Table) -> None:
    row_bytes = max(1, table.nbytes // max(1, table.num_rows))
    with pq.ParquetWriter(
        path, table.schema, compression="zstd", write_page_checksum=True, write_statistics=True, store_schema=True
    ) as writer:
        writer.write_table(table, row_group_size=max(1, min(_MAX_GROUP_ROWS, ROW_GROUP_BYTES // row_bytes)))
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _read(path: Path, artifact: str, columns: list[str] | None) -> pa.Table:
    schema = _schema(artifact)
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    # ParquetFile and not read_table: the latter takes folder names like `a=b` for partitions.
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if file.schema_arrow.names != schema.names:
            raise CorruptArtifactError(
                f"{path} has columns {file.schema_arrow.names}, not those of {artifact}; compute it again"
            )
        return file.read(columns=wanted.names).select(wanted.names).replace_schema_metadata(None).cast(wanted)


def _schema(artifact: str) -> pa.Schema:
    if artifact not in SCHEMAS:
        raise StoreError(f"{artifact!r} is no kind of artifact; there are {', '.join(SCHEMAS)}")
    return SCHEMAS[artifact]
