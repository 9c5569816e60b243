"""Check that a Parquet file is whole, typed and checksummed before it has a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from samples import judgments, sft

from storage import schema, tables
from storage.digest import digest_table
from storage.errors import CorruptArtifactError, StepFailedError, StoreError

if TYPE_CHECKING:
    from pathlib import Path


def test_rows_come_back_in_declared_types(tmp_path: Path) -> None:
    for artifact, table in (("judgments", judgments(300)), ("sft", sft(300)), ("metrics", schema.empty("metrics"))):
        path = tmp_path / artifact
        assert tables.write_table(path, table, artifact) == digest_table(table)
        assert tables.read_table(path, artifact).equals(table)
        assert [left.name for left in tmp_path.iterdir() if left.name.startswith(".")] == []


def test_every_declared_kind_can_be_written_with_nulls_only(tmp_path: Path) -> None:
    """Trap 28: a shard whose optional column is all null must keep the declared type."""
    for artifact, declared in schema.SCHEMAS.items():
        nulls = pa.table({name: pa.nulls(2) for name in reversed(declared.names)})
        tables.write_table(tmp_path / artifact, nulls, artifact)
        back = tables.read_table(tmp_path / artifact, artifact)
        assert back.schema == declared
        pa.concat_tables([back, schema.empty(artifact)])


def test_polars_types_are_cast_to_the_declared_ones(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "x", pl.from_arrow(sft(50)).to_arrow(), "sft")
    assert tables.read_table(tmp_path / "x", "sft").equals(sft(50))


def test_some_columns_are_read_alone(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "x", judgments(50), "judgments")
    assert tables.read_table(tmp_path / "x", "judgments", ["status", "pair_id"]).column_names == ["status", "pair_id"]


def test_undeclared_lost_and_unfit_columns_are_named(tmp_path: Path) -> None:
    table = judgments(3)
    with pytest.raises(StepFailedError, match=r"undeclared columns \['surprise'\] and lacks \['status'\]"):
        tables.write_table(tmp_path / "x", table.rename_columns({"status": "surprise"}), "judgments")
    wide = table.set_column(3, "sample", pa.array([1 << 40] * 3))
    with pytest.raises(StepFailedError, match="declared types"):
        tables.write_table(tmp_path / "x", wide, "judgments")
    with pytest.raises(StoreError, match="'verdicts' is no kind of artifact"):
        tables.write_table(tmp_path / "x", table, "verdicts")
    assert list(tmp_path.iterdir()) == []


def test_an_exception_inside_writing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 27: a failed write must not publish a Parquet file that looks valid."""

    def fail(self: pq.ParquetWriter, table: pa.Table, **_: Any) -> None:
        write(self, table.slice(0, 10))
        raise RuntimeError("in the middle")

    write = pq.ParquetWriter.write_table
    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        tables.write_table(tmp_path / "x", judgments(50), "judgments")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_lost_rows_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = pq.ParquetWriter.write_table
    monkeypatch.setattr(
        pq.ParquetWriter, "write_table", lambda self, table, **options: write(self, table.slice(1), **options)
    )
    with pytest.raises(CorruptArtifactError, match="doesn't read back"):
        tables.write_table(tmp_path / "x", judgments(50), "judgments")
    assert list(tmp_path.iterdir()) == []


def test_flipped_bytes_are_never_read_as_data(tmp_path: Path) -> None:
    """Trap 27: Parquet readers take a flipped byte for data unless pages have checksums; flip one at many places."""
    path = tmp_path / "x"
    table = judgments(2000)
    tables.write_table(path, table, "judgments")
    whole = path.read_bytes()
    found = 0
    for place in range(4, len(whole), len(whole) // 150):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            assert tables.read_table(path, "judgments").equals(table)  # a byte that means nothing, in the footer
        except CorruptArtifactError:
            found += 1
    assert found > 100


def test_pages_have_checksums(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "x", judgments(100), "judgments")
    data = bytearray((tmp_path / "x").read_bytes())
    with pq.ParquetFile(tmp_path / "x") as file:
        chunk = file.metadata.row_group(0).column(8)
    data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CorruptArtifactError, match=r"x can't be read as judgments: .*CRC"):
        tables.read_table(tmp_path / "x", "judgments")


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all, but long enough to look"])
def test_what_is_no_parquet_is_corrupt(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CorruptArtifactError, match="can't be read as judgments"):
        tables.read_table(tmp_path / "x", "judgments")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "x", sft(3), "sft")
    with pytest.raises(CorruptArtifactError, match="not those of judgments"):
        tables.read_table(tmp_path / "x", "judgments")


def test_folder_names_are_no_partitions(tmp_path: Path) -> None:
    folder = tmp_path / "status=wrong"
    folder.mkdir()
    tables.write_table(folder / "x", judgments(3), "judgments")
    assert tables.read_table(folder / "x", "judgments").equals(judgments(3))
