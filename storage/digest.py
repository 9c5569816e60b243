"""Name content: digests of JSON, files and tables that depend on nothing but the content.

The digest of a table is over its canonical Arrow content: column names and types in order, then per column the
validity, the lengths and the value bytes. It doesn't depend on chunks, slices, Parquet encoding or shard bounds, nor on
which of Arrow's string, list or dictionary layouts carries the values. Nulls hide their slot, every NaN is one NaN, 0.0
and -0.0 differ.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Json = Mapping[str, Any] | Sequence[Any] | str | int | float | bool | None


def canonical_json(obj: Json) -> bytes:
    """Spell JSON in one way only: sorted keys, no spaces, UTF-8; NaN and infinities raise ValueError."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(obj: Json) -> str:
    """Return the SHA-256 (hex) of the canonical JSON."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def digest_bytes(data: bytes) -> str:
    """Return the SHA-256 (hex) of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: str | Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_table(table: pa.Table) -> str:
    """Return the SHA-256 (hex) of a table's canonical content."""
    total = TableDigest(table.schema)
    total.update(table)
    return total.hexdigest()


class TableDigest:
    """Digest a table that arrives in pieces; the bounds of the pieces leave no trace."""

    def __init__(self, schema: pa.Schema) -> None:
        self._names = list(schema.names)
        self._columns = [_ColumnDigest(field.type) for field in schema]
        self._rows = 0

    def update(self, table: pa.Table) -> None:
        """Add the rows of a table whose columns have the names and types given at the start."""
        if table.schema.names != self._names:
            raise ValueError(f"columns {table.schema.names} are not the columns {self._names} of the digest")
        for column, data in zip(self._columns, table.columns, strict=True):
            for chunk in data.chunks:
                column.update(chunk)
        self._rows += table.num_rows

    def hexdigest(self) -> str:
        """Return the digest of all rows so far."""
        columns = [
            [name, column.kind, column.digests()] for name, column in zip(self._names, self._columns, strict=True)
        ]
        return digest_json(["starwheel table 1", self._rows, columns])


class _ColumnDigest:
    """Digest one column: a hash for each buffer of its canonical layout, children recursively."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._type = _plain(dtype)
        self.kind = _kind(self._type)
        self._validity = hashlib.sha256()
        self._lengths = hashlib.sha256()
        self._values = hashlib.sha256()
        self._children = [_ColumnDigest(child) for child in _children(self._type)]

    def update(self, array: pa.Array) -> None:
        if array.type != self._type:
            array = array.cast(self._type)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        self._validity.update(_validity(array).data)
        if pa.types.is_struct(self._type):
            for child, values in zip(self._children, array.flatten(), strict=True):
                child.update(values)
        elif pa.types.is_large_list(self._type):
            self._lengths.update(_lengths(pc.list_value_length(array)).data)
            self._children[0].update(array.flatten())
        elif pa.types.is_large_string(self._type) or pa.types.is_large_binary(self._type):
            self._update_strings(array)
        elif not pa.types.is_null(self._type):
            self._values.update(_fixed_width(array, self._type).data)

    def _update_strings(self, array: pa.Array) -> None:
        if array.null_count:
            array = pc.fill_null(array, "" if pa.types.is_large_string(self._type) else b"")
        self._lengths.update(_lengths(pc.binary_length(array)).data)
        _, offsets, data = array.buffers()
        if data is None or not len(array):
            return
        ends = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
        self._values.update(memoryview(data)[int(ends[0]) : int(ends[-1])])

    def digests(self) -> list[Any]:
        own = [hash_.hexdigest() for hash_ in (self._validity, self._lengths, self._values)]
        return [*own, [child.digests() for child in self._children]]


def _plain(dtype: pa.DataType) -> pa.DataType:
    """Choose one layout for each kind of values."""
    if pa.types.is_dictionary(dtype):
        return _plain(dtype.value_type)
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or dtype == pa.string_view():
        return pa.large_string()
    if pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or dtype == pa.binary_view():
        return pa.large_binary()
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype):
        return pa.large_list(_plain(dtype.value_type))
    if pa.types.is_struct(dtype):
        return pa.struct([(field.name, _plain(field.type)) for field in dtype])
    if (
        pa.types.is_null(dtype)
        or pa.types.is_boolean(dtype)
        or pa.types.is_integer(dtype)
        or pa.types.is_floating(dtype)
    ):
        return dtype
    raise TypeError(f"no artifact has columns of type {dtype}")


def _kind(dtype: pa.DataType) -> str:
    """Spell a plain type independently of Arrow's own wording."""
    if pa.types.is_struct(dtype):
        return "struct<" + ",".join(f"{field.name}:{_kind(field.type)}" for field in dtype) + ">"
    if pa.types.is_large_list(dtype):
        return f"list<{_kind(dtype.value_type)}>"
    if pa.types.is_large_string(dtype):
        return "string"
    return "binary" if pa.types.is_large_binary(dtype) else str(dtype)


def _children(dtype: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_struct(dtype):
        return [field.type for field in dtype]
    return [dtype.value_type] if pa.types.is_large_list(dtype) else []


def _validity(array: pa.Array) -> NDArray[np.uint8]:
    """Return one byte a row: 1 where there is a value."""
    if not array.null_count:
        return np.ones(len(array), dtype=np.uint8)
    return _numpy(pc.cast(array.is_valid(), pa.uint8()))


def _lengths(lengths: pa.Array) -> NDArray[np.int64]:
    return _numpy(pc.cast(pc.fill_null(lengths, 0), pa.int64())).astype("<i8", copy=False)


def _fixed_width(array: pa.Array, dtype: pa.DataType) -> NDArray[Any]:
    if pa.types.is_boolean(dtype):
        return _numpy(pc.cast(pc.fill_null(array, False), pa.uint8()))
    values = _numpy(pc.fill_null(array, pa.scalar(0, dtype)) if array.null_count else array)
    if pa.types.is_floating(dtype):
        missing = np.isnan(values)
        if missing.any():
            values = np.where(missing, values.dtype.type(np.nan), values)
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))


def _numpy(array: pa.Array) -> NDArray[Any]:
    out: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return out
