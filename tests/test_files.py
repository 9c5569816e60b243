"""Files of every kind give the same rows; what holds none is one sentence; nasty ones lose no row uncounted."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import tarfile
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_formats import CHOSEN, LABELLED, check, jsonl, judge, reasons, user

from storage.errors import DataError
from tasks.data.formats import FileKind, Form, Reason, read_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

ROWS = [
    LABELLED,
    LABELLED | {"prompt": 'two\nlines, "quoted"; and\ta tab', "label": "B"},
    LABELLED | {"prompt": "größe 東京 🙂\u2028", "label": "tie"},
]


def csv_text(rows: Sequence[dict[str, Any]], delimiter: str = ",", end: str = "\r\n") -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator=end)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


WRITTEN: dict[str, tuple[str, bytes, str]] = {
    "jsonl": ("x.jsonl", "\n".join(json.dumps(row) for row in ROWS).encode(), "jsonl"),
    "json lines under .json": ("x.json", "\n".join(json.dumps(row) for row in ROWS).encode(), "jsonl"),
    "json": ("x.json", json.dumps(ROWS, ensure_ascii=False).encode(), "json"),
    "indented json": ("x.json", b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode() + b"\n \n", "json"),
    "indented json under .jsonl": ("x.jsonl", json.dumps(ROWS, indent=1).encode(), "json"),
    "json without an ending": ("x", json.dumps(ROWS).encode(), "json"),
    "csv": ("x.csv", csv_text(ROWS).encode(), "csv"),
    "csv of excel": ("x.csv", b"\xef\xbb\xbf" + csv_text(ROWS, ";").encode(), "csv"),
    "tsv": ("x.tsv", csv_text(ROWS, "\t", "\n").encode(), "csv"),
    "csv without an ending": ("x", csv_text(ROWS).encode(), "csv"),
    "parquet": ("x.parquet", parquet(ROWS), "parquet"),
    "parquet under another ending": ("x.csv", parquet(ROWS), "parquet"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_kind_gives_the_same_pairs(name: str, tmp_path: Path) -> None:
    file, content, kind = WRITTEN[name]
    (tmp_path / file).write_bytes(content)
    expected = read_pairs(pa.Table.from_pylist(ROWS), name="x")
    reading = check(read_pairs(tmp_path / file, name="x"))
    assert reading.pairs == expected.pairs
    assert reading.ledger == expected.ledger
    assert reading.layout.endswith(f"({kind})")
    if kind != "parquet":
        (tmp_path / f"{file}.gz").write_bytes(gzip.compress(content[:40]) + gzip.compress(content[40:]))
        packed = read_pairs(tmp_path / f"{file}.gz", name="x")
        assert packed.pairs == expected.pairs
        assert packed.layout.endswith(f"({kind}, gzipped)")


def test_the_kind_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(csv_text(ROWS[:1]).replace(",", ";"))
    (tmp_path / "rows").write_text("\n".join(json.dumps(row) for row in ROWS))
    assert read_pairs(tmp_path / "x.txt", name="x", form=Form(file=FileKind.CSV)).counts["kept"] == 1
    for kind in (FileKind.JSON, FileKind.PARQUET):
        with pytest.raises(DataError, match=r"no JSON array|can't be read"):
            read_pairs(tmp_path / "rows", name="x", form=Form(file=kind))


def test_messages_in_a_csv_cell(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": [user("q"), judge("good")], "rejected": [user("q"), judge("bad")]}
    cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
    (tmp_path / "x.csv").write_text(csv_text([cells]))
    expected = read_pairs(pa.Table.from_pylist([row]), name="x").pairs
    assert check(read_pairs(tmp_path / "x.csv", name="x")).pairs == expected


def test_a_csv_cell_that_only_looks_like_messages(tmp_path: Path) -> None:
    asked = {"prompt": "give me JSON", "response_a": '[{"a": 1}]', "response_b": "[{", "label": "A"}
    python = {**asked, "prompt": "[{'content': 'q', 'role': 'user'}]"}
    (tmp_path / "x.csv").write_text(csv_text([asked, python]))
    reading = read_pairs(tmp_path / "x.csv", name="x")
    assert {reading.pairs[name][0].as_py() for name in ("response_a", "response_b")} == {'[{"a": 1}]', "[{"}
    assert reasons(reading) == [Reason.BAD_JSON]


def test_bad_csv_rows_have_a_reason(tmp_path: Path) -> None:
    lines = [
        b"prompt,response_a,response_b,label",
        b"p,x,y,A",
        b"",
        b"p2,x,y",
        b"p3,x,y,A,more",
        b'"p4"x,x,y,A',
        b"p5,caf\xe9,y,A",
        b"p6,x\0,y,A",
        b"p7,x,y,",
        b"p8,x,y,B",
    ]
    (tmp_path / "x.csv").write_bytes(b"\n".join(lines))
    reading = read_pairs(tmp_path / "x.csv", name="x")
    assert reasons(reading) == [*[Reason.BAD_CSV] * 3, *[Reason.BAD_ENCODING] * 2, Reason.BAD_LABEL]
    assert reading.ledger["row"].to_pylist() == list(range(8))
    assert reading.dropped["detail"].to_pylist()[0] == "3 fields, the header has 4"


def test_huge_rows_of_every_kind_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.data.text_rows.MAX_ROW", 200)
    rows = [LABELLED | {"prompt": "x" * 5000}, LABELLED, LABELLED | {"prompt": "]}" * 300}]
    for file, content in (("x.json", json.dumps(rows)), ("x.csv", csv_text(rows))):
        (tmp_path / file).write_text(content)
        reading = read_pairs(tmp_path / file, name="x")
        assert reasons(reading) == [Reason.TOO_LARGE] * 2
        assert reading.ledger["row"].to_pylist() == [0, 1, 2]


BAD_ELEMENTS: list[tuple[bytes, Reason]] = [
    (b"1", Reason.BAD_TYPE),
    (b"null", Reason.BAD_TYPE),
    (b'["x", ["y"]]', Reason.BAD_TYPE),
    (b'"a, [b]"', Reason.BAD_TYPE),
    (b'{"prompt": "\xff", "response_a": "1", "response_b": "2", "label": "A"}', Reason.BAD_ENCODING),
    (b'{"prompt": ' + b"9" * 5000 + b"}", Reason.BAD_JSON),
    (b"[" * 90_000 + b"]" * 90_000, Reason.BAD_JSON),
    (b"{}", Reason.MISSING_FIELD),
]


@pytest.mark.parametrize(("element", "reason"), BAD_ELEMENTS, ids=[str(i) for i in range(len(BAD_ELEMENTS))])
def test_bad_elements_of_an_array_have_a_reason(element: bytes, reason: Reason, tmp_path: Path) -> None:
    good = json.dumps(LABELLED | {"prompt": '"],}[{\\'}).encode()
    (tmp_path / "x.json").write_bytes(b"[" + good + b",\n" + element + b" , " + good.replace(b'"hi"', b'"ho"') + b"]")
    reading = read_pairs(tmp_path / "x.json", name="x")
    assert reasons(reading) == [reason]
    assert reading.ledger["row"].to_pylist() == [0, 1, 2]


def tar_of(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("x.jsonl")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


ROW = json.dumps(LABELLED).encode()
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "pointer": ("x.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:x\nsize 3\n", "Git LFS pointer"),
    "pointer, json": ("x.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:x\nsize 3\n", "git lfs pull"),
    "zip": ("x.csv", b"PK\x03\x04rest", "zip archive: unzip it"),
    "zip in gzip": ("x.csv.gz", gzip.compress(b"PK\x03\x04rest"), "zip archive: unzip it"),
    "html": ("x.json", b"\n <!DOCTYPE html><html>Not found", "is a web page, not data"),
    "tar": ("x.jsonl", tar_of(ROW), "is a tar archive"),
    "tar in gzip": ("x.jsonl.gz", gzip.compress(tar_of(ROW)), "is a tar archive"),
    "pickle": ("x.pkl", b"\x80\x04\x95rest", "is a Python pickle, which is never read"),
    "cut gzip": ("x.jsonl.gz", gzip.compress(ROW * 99)[:-9], "is a damaged gzip file"),
    "gzip with junk": ("x.jsonl.gz", b"\x1f\x8b\x08" + b"\xff" * 99, "is a damaged gzip file"),
    "gzipped parquet": ("x.parquet.gz", gzip.compress(parquet(ROWS)), "is a gzipped Parquet file: gunzip it"),
    "no rows, json": ("x.json", b"[ \n ]", "has no rows"),
    "no rows, csv": ("x.csv", b"prompt,chosen,rejected\r\n", "has no rows"),
    "empty": ("x.csv", b"", "has no rows"),
    "empty gzip": ("x.json.gz", gzip.compress(b""), "has no rows"),
    "cut json": ("x.json", b"[" + ROW + b", " + ROW[:20], "ends inside its array, after 1 elements"),
    "cut json, whole": ("x.json", b"[" + ROW, "ends inside its array, after 0 elements"),
    "broken json": ("x.json", b"[" + ROW + b", {'a': 1}, " + ROW + b"]", "is no JSON after 1 elements"),
    "trailing comma": ("x.json", b"[" + ROW + b", ]", "is no JSON after 1 elements"),
    "two arrays": ("x.json", b"[" + ROW + b"]\n[" + ROW + b"]", "goes on after the end of its array"),
    "one object": ("x.json", json.dumps({"data": ROWS}, indent=1).encode(), "no line with a JSON object"),
    "open quote": ("x.csv", csv_text(ROWS).encode() + b'p,"x,y,A\r\np,x,y,A\r\n', "never closed: mend that row"),
    "csv without columns": ("x.csv", b"1,2,3\n4,5,6\n", "has the columns 1, 2, 3; pairs need"),
    "csv, one column twice": ("x.csv", b"prompt,prompt,chosen,rejected\na,b,c,d\n", "has the column 'prompt' twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_no_rows_is_one_sentence(name: str, tmp_path: Path) -> None:
    file, content, words = REFUSED[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        read_pairs(tmp_path / file, name="x")
    assert str(error.value).startswith(str(tmp_path / file))
    assert "\n" not in str(error.value)


def test_an_address_stands_for_the_cached_file(tmp_path: Path) -> None:
    """What came from S3 lies under its digest: its own address tells the kind and names it in errors."""
    (tmp_path / "0123").write_text(csv_text(ROWS))
    address = "s3://bucket/rows.csv"
    assert read_pairs(tmp_path / "0123", name="x", form=Form(address=address)).layout.endswith("(csv)")
    (tmp_path / "0123").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=f"^{address} is a zip"):
        read_pairs(tmp_path / "0123", name="x", form=Form(address=address))


def test_an_array_is_read_without_holding_it(tmp_path: Path) -> None:
    """24 MiB of rows, read one by one; what Python allocates at once stays at a few rows' size."""
    import tracemalloc

    row = json.dumps(LABELLED | {"prompt": "x" * 2**20, "label": "tie"})
    (tmp_path / "x.json").write_text("[" + ",".join([row] * 24) + "]")
    from tasks.data.files import open_file

    tracemalloc.start()
    try:
        where = str(tmp_path / "x.json")
        rows = open_file(tmp_path / "x.json", where=where, kind=None, wanted=lambda columns: list(columns)).rows
        assert sum(1 for _ in rows) == 24
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20, peak


# ---- 500 files from a seed -------------------------------------------------------------------------------------------

NAMES = (*LABELLED, *CHOSEN, "conversations", "trajectory", "instruction", "output_1", "output_2", "preference", "id")
TEXTS = ("", " ", "A", "b", "tie", "1", "x\0", "\ud800", "\u202e\x1b[31m", "x" * 400, '[{"role": 1}]', "\n\nHuman: a")


def junk(draw: random.Random, depth: int = 3) -> Any:
    """Make a value as people's files hold it where a text should be."""
    plain: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.choice(TEXTS),
        lambda: draw.choice([True, False, 0, 1, 2, -1, 10**30, 1.5, float("nan"), float("inf")]),
    ]
    nested: list[Callable[[], Any]] = [
        lambda: [junk(draw, depth - 1) for _ in range(draw.randrange(4))],
        lambda: {
            draw.choice(["role", "content", "from", "value", "type", "text"]): junk(draw, depth - 1)
            for _ in range(draw.randrange(4))
        },
        lambda: [
            {"role": draw.choice(["user", "assistant", "tool"]), "content": junk(draw, depth - 1)}
            for _ in range(draw.randrange(4))
        ],
        lambda: [said(draw, depth) for _ in range(draw.randrange(4))],
    ]
    return draw.choice(plain + (nested if depth else []))()


def said(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"from": draw.choice(["human", "gpt", "observation"]), "value": junk(draw, depth - 1)}


def record(draw: random.Random) -> Any:
    base = draw.choice([LABELLED, CHOSEN, {"chosen": TEXTS[-1], "rejected": TEXTS[-1]}, {}])
    changed = base | {draw.choice(NAMES): junk(draw) for _ in range(draw.randrange(3))}
    return draw.choice([base, changed, changed, changed, junk(draw)])


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Cut, repeat or overwrite a few bytes, or take another encoding."""
    for _ in range(draw.choice([0, 0, 1, 2])):
        at = draw.randrange(len(content) + 1)
        content = draw.choice(
            [
                content[:at],
                content[:at] + draw.choice([b"\xff", b"\0", b'"', b"\n", b"]", b"{", b"\\", b","]) + content[at:],
                content[:at] + content[at + 1 :],
                content + content[at:],
                content.decode("latin-1").encode("utf-16-le"),
            ]
        )
    return content


def nasty(draw: random.Random) -> tuple[str, bytes]:
    rows = [record(draw) for _ in range(draw.randrange(1, 7))]
    kind = draw.choice(["jsonl", "json", "csv", "parquet", "txt"])
    if kind == "parquet":
        tables = [row for row in rows if isinstance(row, dict)] or [LABELLED]
        try:
            content = parquet(tables)
        except (pa.ArrowException, UnicodeError, OverflowError):
            content = parquet([{name: str(value) for name, value in LABELLED.items()}])
    elif kind == "csv":
        fields = [*LABELLED]
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(fields)
        for row in rows:
            cells = [row.get(name) for name in fields] if isinstance(row, dict) else [row]
            writer.writerow([json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in cells])
        content = text.getvalue().encode("utf-8", "surrogatepass")
    else:
        lines = [json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows]
        content = ("[" + ",".join(lines) + "]" if kind == "json" else "\n".join(lines)).encode("utf-8", "surrogatepass")
    content = damaged(draw, content)
    return (f"x.{kind}.gz", gzip.compress(content)) if draw.random() < 0.2 else (f"x.{kind}", content)


def test_500_nasty_files_lose_no_row_uncounted(tmp_path: Path) -> None:
    """Each is read, its rows counted, or refused in one sentence; `check` holds rows in = pairs + dropped by reason."""
    read, refused, found = 0, [], set()
    for seed in range(500):
        name, content = nasty(random.Random(seed))
        file = tmp_path / name
        file.write_bytes(content)
        try:
            reading = check(read_pairs(file, name="x"))
        except DataError as error:
            refused.append((str(file), str(error)))
            continue
        read += 1
        found |= set(reading.dropped["reason"].to_pylist())
        places = reading.ledger["row"].to_pylist()
        assert sorted(set(places)) == places, seed  # no row twice
        if name == "x.jsonl":
            assert len(places) == sum(bool(line.strip()) for line in content.split(b"\n")), seed
        elif ".jsonl" not in name and ".txt" not in name:
            assert places == list(range(len(places))), seed
    assert read > 200, "most of them are read"
    assert len(refused) > 50
    assert all(told.startswith(where) and "\n" not in told for where, told in refused)
    assert len(found) >= 10, found


def test_bytes_in_rows_out(tmp_path: Path) -> None:
    """Rows of an undamaged file of each kind are all in the ledger, good ones and bad ones."""
    for seed in range(60):
        draw = random.Random(seed)
        rows = [*[LABELLED] * 6, *(record(draw) for _ in range(5))]
        (tmp_path / "x.json").write_text(json.dumps(rows))
        assert check(read_pairs(tmp_path / "x.json", name="x")).counts["in"] == 11
        assert check(read_pairs(jsonl(tmp_path / "x.jsonl", *rows), name="x")).counts["in"] == 11
