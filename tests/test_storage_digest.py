"""Hold the digests of content to fixed values and to what they must and must not depend on."""

from __future__ import annotations

import hashlib
import math
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import judgments, sft

from storage.digest import TableDigest, canonical_json, digest_file, digest_json, digest_table

MIXED = pa.table(
    {
        "text": pa.array(["a", None, "", "bcd"], pa.large_string()),
        "number": pa.array([1, None, -3, 4], pa.int32()),
        "real": pa.array([0.5, math.nan, None, -0.0], pa.float64()),
        "flag": pa.array([True, None, False, True]),
        "messages": pa.array(
            [[{"role": "user", "content": "x"}], [], None, [{"role": None, "content": "y"}] * 2],
            pa.list_(pa.struct([("role", pa.large_string()), ("content", pa.large_string())])),
        ),
    }
)
GOLDEN_JSON = "5cffe7b2256261270211e66d136e0fc423a603024179f1fb99fe31e771368b2f"
GOLDEN_MIXED = "d5dc089bee212ea67a36f8a18777349dd157f51c405ed291a6ff617b05b0cd4d"
GOLDEN_EMPTY = "f46386f2b16822689c4d8a7357d0c47a040b29ffb1b951ac637a276d371b2283"
GOLDEN_JUDGMENTS = "018b8fe11670105190e4964490d575462e10c371fd485001be63b1775ada2e34"


def test_golden_values() -> None:
    """Hold the digests for ever: keys of committed steps are made of them. Never mend this test by changing a value."""
    assert digest_json({"b": [1, 2.5, None, True], "a": "ü"}) == GOLDEN_JSON
    assert digest_table(MIXED) == GOLDEN_MIXED
    assert digest_table(MIXED.slice(0, 0)) == GOLDEN_EMPTY
    assert digest_table(judgments(100)) == GOLDEN_JUDGMENTS


def test_a_plain_reading_of_the_definition_agrees() -> None:
    """Compute the digest row by row, as the module's first lines define it."""
    kinds = ["string", "int32", "double", "bool", "list<struct<role:string,content:string>>"]
    columns = [
        [field.name, kind, _by_rows(MIXED.column(field.name).to_pylist(), kind)]
        for field, kind in zip(MIXED.schema, kinds, strict=True)
    ]
    assert digest_table(MIXED) == digest_json(["starwheel table 1", 4, columns])


def _by_rows(values: list[Any], kind: str) -> list[Any]:
    validity, lengths, data = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    children: list[list[Any]] = []
    for value in values:
        validity.update(bytes([value is not None]))
        if kind == "string":
            text = (value or "").encode()
            lengths.update(struct.pack("<q", len(text)))
            data.update(text)
        elif kind.startswith("list"):
            lengths.update(struct.pack("<q", len(value or [])))
        elif not kind.startswith("struct"):
            data.update(struct.pack({"int32": "<i", "double": "<d", "bool": "<?"}[kind], 0 if value is None else value))
    if kind.startswith("list<"):
        children = [_by_rows([item for value in values for item in value or []], kind[5:-1])]
    elif kind.startswith("struct<"):
        names = [part.split(":") for part in kind[7:-1].split(",")]
        children = [_by_rows([(value or {}).get(name) for value in values], inner) for name, inner in names]
    return [validity.hexdigest(), lengths.hexdigest(), data.hexdigest(), children]


def test_canonical_json_is_one_spelling() -> None:
    assert canonical_json({"b": 1, "a": "ü"}) == '{"a":"ü","b":1}'.encode()
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": math.nan})


def test_digest_file_is_sha256(tmp_path: Any) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert digest_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6), st.sampled_from([MIXED, judgments(40), sft(40)]))
def test_chunks_and_slices_leave_no_trace(cuts: list[int], table: pa.Table) -> None:
    bounds = sorted({0, table.num_rows, *(min(cut, table.num_rows) for cut in cuts)})
    pieces = [table.slice(start, stop - start) for start, stop in pairwise(bounds)]
    total = TableDigest(table.schema)
    for piece in pieces:
        total.update(piece)
    assert digest_table(pa.concat_tables(pieces)) == total.hexdigest() == digest_table(table)


def test_parquet_polars_and_dictionaries_leave_no_trace(tmp_path: Any) -> None:
    table = sft(500)
    for compression, group in (("zstd", 7), ("none", 500)):
        pq.write_table(table, tmp_path / "t", compression=compression, row_group_size=group)
        assert digest_table(pq.read_table(tmp_path / "t")) == digest_table(table)
    assert digest_table(pl.from_arrow(table).to_arrow()) == digest_table(table)
    text = table.column("pair_id")
    encoded = table.set_column(0, "pair_id", text.dictionary_encode())
    small = table.set_column(0, "pair_id", text.cast(pa.string()))
    assert digest_table(encoded) == digest_table(small) == digest_table(table)


def test_what_a_null_hides_leaves_no_trace() -> None:
    plain = pa.array([1, None, 3], pa.int64())
    values = pa.py_buffer(np.array([1, 99, 3], dtype="<i8").tobytes())
    hidden = pa.Array.from_buffers(pa.int64(), 3, [plain.buffers()[0], values])
    assert digest_table(pa.table({"x": plain})) == digest_table(pa.table({"x": hidden}))
    other_nan = np.array([0x7FF8000000000001], dtype="<u8").view("<f8")
    assert digest_table(pa.table({"x": other_nan})) == digest_table(pa.table({"x": [math.nan]}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["", None], [None, ""]),
        ([[1, 2], [3]], [[1], [2, 3]]),
        ([[], None], [None, []]),
        ([[None], []], [[], [None]]),
        ([0, 1], [1, 0]),
        ([0, None], [None, 0]),
        ([0.0], [-0.0]),
        ([True, False], [1, 0]),
        ([{"a": None}], [None]),
        ([1], [1, None]),
    ],
)
def test_other_content_is_another_digest(one: list[Any], other: list[Any]) -> None:
    assert digest_table(pa.table({"x": one})) != digest_table(pa.table({"x": other}))


def test_names_types_and_order_of_columns_count() -> None:
    table = pa.table({"x": pa.array([1], pa.int32()), "y": pa.array([2], pa.int32())})
    variants = [
        table,
        table.select(["y", "x"]),
        table.rename_columns(["x", "z"]),
        table.cast(pa.schema([("x", pa.int64()), ("y", pa.int32())])),
    ]
    assert len({digest_table(variant) for variant in variants}) == len(variants)


def test_pieces_of_other_columns_are_refused() -> None:
    total = TableDigest(MIXED.schema)
    with pytest.raises(ValueError, match="columns"):
        total.update(MIXED.drop_columns(["flag"]))
