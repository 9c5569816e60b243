"""Every row of a source becomes a pair or a reason, whatever the file holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tasks.data.formats as formats
from storage.errors import DataError
from storage.schema import SCHEMAS
from tasks.data.formats import Reading, Reason, combine, read_pairs
from tasks.data.pairing import pair_id, prompt_key
from tasks.data.synthetic import generate

SHARED = Path(__file__).parents[2] / "shared" / "data"
LABELLED: dict[str, Any] = {"prompt": "Say hi.", "response_a": "hi", "response_b": "no", "label": "A"}
CHOSEN: dict[str, Any] = {"prompt": "Say hi.", "chosen": "hi", "rejected": "no"}


def jsonl(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def check(reading: Reading) -> Reading:
    """Check what holds for every reading: rows in = pairs + dropped, declared schemas, ids that name the content."""
    counts = reading.counts
    assert counts["in"] == counts["kept"] + sum(counts["dropped"].values())
    assert reading.pairs.schema == SCHEMAS["pairs"]
    assert reading.ledger.schema == SCHEMAS["splits"]
    reading.ledger.validate(full=True)
    reading.pairs.validate(full=True)
    kept = reading.ledger.filter(pa.compute.is_null(reading.ledger["split"]))
    ids = reading.pairs["pair_id"].to_pylist()
    assert kept["pair_id"].to_pylist() == ids == reading.extras["pair_id"].to_pylist()
    assert len(set(ids)) == len(ids)
    assert all(reason in list(Reason) for reason in reading.dropped["reason"].to_pylist())
    for pair in reading.pairs.to_pylist():
        prompt = tuple((message["role"], message["content"]) for message in pair["prompt"])
        assert pair["pair_id"] == pair_id(prompt, pair["response_a"], pair["response_b"])
        assert pair["gold"] in ("A", "B")
    return reading


def reasons(reading: Reading) -> list[str]:
    return check(reading).dropped["reason"].to_pylist()


def winner(pair: dict[str, Any]) -> str:
    return pair["response_a"] if pair["gold"] == "A" else pair["response_b"]


def test_labelled_rows_are_stored_as_given(tmp_path: Path) -> None:
    row = LABELLED | {"id": 7, "group": 3, "source": "hub", "subset": "chat", "rationale": "why", "other": {"x": [1]}}
    reading = check(
        read_pairs(jsonl(tmp_path / "x.jsonl", row, LABELLED | {"prompt": "2", "label": " b "}), name="mine")
    )
    first, second = reading.pairs.to_pylist()
    assert first["prompt"] == [{"role": "user", "content": "Say hi."}]
    assert [first[key] for key in ("response_a", "response_b", "gold")] == ["hi", "no", "A"]
    assert [first[key] for key in ("group", "source", "subset")] == ["3", "hub", "chat"]
    assert [second[key] for key in ("gold", "source", "subset")] == ["B", "mine", "mine"]
    assert second["group"] == prompt_key((("user", "2"),))
    assert reading.extras.to_pylist()[0] == {"pair_id": first["pair_id"], "id": "7", "rationale": "why"}
    assert reading.ledger["source"].to_pylist() == ["mine", "mine"]
    assert reading.layout == "labelled: prompt, response_a, response_b, label (jsonl)"


def test_chosen_is_gold_and_about_half_the_time_first() -> None:
    rows = [CHOSEN | {"prompt": f"p{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(400)]
    pairs = check(read_pairs(pa.Table.from_pylist(rows), name="x")).pairs.to_pylist()
    assert [winner(pair) for pair in pairs] == [row["chosen"] for row in rows]
    assert 160 <= sum(pair["gold"] == "A" for pair in pairs) <= 240
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    other = read_pairs(pa.Table.from_pylist(swapped), name="x").pairs.to_pylist()
    assert [pair["pair_id"] for pair in other] == [pair["pair_id"] for pair in pairs]  # the place tells nothing of gold


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def judge(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("prompt", "shared", "expected"),
    [
        ("q", [user("q")], [user("q")]),
        ("q\n", [user("q")], [user("q")]),
        (None, [user("q")], [user("q")]),
        ([user("q")], [], [user("q")]),
        ("q", [], [user("q")]),
        ("q", [{"role": "system", "content": "s"}, user("q")], [{"role": "system", "content": "s"}, user("q")]),
        ([{"role": "system", "content": "s"}, user("q")], [user("q")], [{"role": "system", "content": "s"}, user("q")]),
        ("q", [user("q"), judge("r"), user("t")], [user("q"), judge("r"), user("t")]),
    ],
)
def test_shared_messages_are_split_off(tmp_path: Path, prompt: object, shared: list[Any], expected: list[Any]) -> None:
    row = {"prompt": prompt, "chosen": [*shared, judge("good")], "rejected": [*shared, judge("bad")]}
    (pair,) = check(read_pairs(jsonl(tmp_path / "x.jsonl", row), name="x")).pairs.to_pylist()
    assert pair["prompt"] == expected
    assert winner(pair) == "good"


def test_messages_without_a_prompt_column_are_read() -> None:
    row = {"chosen": [user("q"), judge("good")], "rejected": [user("q"), judge("bad")]}
    (pair,) = check(read_pairs(pa.Table.from_pylist([row]), name="x")).pairs.to_pylist()
    assert pair["prompt"] == [user("q")]


BAD_ROWS: list[tuple[object, Reason]] = [
    (LABELLED | {"label": "tie"}, Reason.TIE),
    (LABELLED | {"label": "Both"}, Reason.TIE),
    (LABELLED | {"label": "C"}, Reason.BAD_LABEL),
    (LABELLED | {"label": 1}, Reason.BAD_TYPE),
    (LABELLED | {"label": None}, Reason.MISSING_FIELD),
    (LABELLED | {"prompt": " \n"}, Reason.EMPTY_PROMPT),
    (LABELLED | {"prompt": []}, Reason.EMPTY_PROMPT),
    (LABELLED | {"prompt": [judge("x")]}, Reason.EMPTY_PROMPT),
    (LABELLED | {"response_b": "\t"}, Reason.EMPTY_RESPONSE),
    (LABELLED | {"response_b": []}, Reason.EMPTY_RESPONSE),
    (LABELLED | {"response_b": " hi\n"}, Reason.IDENTICAL_RESPONSES),
    (LABELLED | {"prompt": True}, Reason.BAD_TYPE),
    (LABELLED | {"response_a": {"text": "x"}}, Reason.BAD_TYPE),
    (LABELLED | {"prompt": ["x"]}, Reason.BAD_TYPE),
    (LABELLED | {"prompt": [{"role": "bot", "content": "x"}]}, Reason.BAD_TYPE),
    (LABELLED | {"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, Reason.MISSING_FIELD),
    (LABELLED | {"prompt": [{"role": "user"}]}, Reason.MISSING_FIELD),
    (LABELLED | {"group": [1]}, Reason.BAD_TYPE),
    (LABELLED | {"response_a": [judge("x"), judge("y")]}, Reason.DIVERGING_PROMPT),
    (LABELLED | {"response_a": [user("x")], "response_b": [user("y")]}, Reason.BAD_TYPE),
    (
        LABELLED | {"response_a": [user("other"), judge("x")], "response_b": [user("other"), judge("y")]},
        Reason.DIVERGING_PROMPT,
    ),
    (LABELLED | {"response_a": "x\0y"}, Reason.BAD_ENCODING),
    (LABELLED | {"response_a": "\ud800"}, Reason.BAD_ENCODING),
    (LABELLED | {"subset": "\udfff"}, Reason.BAD_ENCODING),
    ({"prompt": "x"}, Reason.MISSING_FIELD),
    ([1, 2], Reason.BAD_TYPE),
    (None, Reason.BAD_TYPE),
    (b'{"prompt": "x', Reason.BAD_JSON),
    (b'{"prompt": ' + b"[" * 100_000, Reason.BAD_JSON),
    (b'{"prompt": ' + b"9" * 5000 + b"}", Reason.BAD_JSON),
    (b'{"prompt": "caf\xe9"}', Reason.BAD_ENCODING),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=[f"{i}-{reason}" for i, (_, reason) in enumerate(BAD_ROWS)])
def test_bad_row_has_a_reason(tmp_path: Path, row: object, reason: Reason) -> None:
    reading = read_pairs(jsonl(tmp_path / "x.jsonl", row, b" ", LABELLED), name="x")
    assert reasons(reading) == [reason]
    assert reading.dropped["row"].to_pylist() == [0]
    assert reading.ledger["row"].to_pylist() == [0, 2]  # the line of the file; blank lines are no rows
    assert reading.pairs.num_rows == 1


def test_huge_rows_are_dropped_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.data.text_rows.MAX_ROW", 200)
    monkeypatch.setattr("tasks.data.pairing.MAX_ROW", 80)
    long, longer, longest = (LABELLED | {"prompt": "x" * n} for n in (90, 300, 2000))
    reading = read_pairs(jsonl(tmp_path / "x.jsonl", longest, long, longer, LABELLED), name="x")
    assert reasons(reading) == [Reason.TOO_LARGE] * 3
    assert reading.pairs.num_rows == 1


def test_twins_are_found(tmp_path: Path) -> None:
    swapped = LABELLED | {"response_a": "no", "response_b": "hi"}
    other = LABELLED | {"prompt": "Else."}
    reading = read_pairs(
        jsonl(
            tmp_path / "x.jsonl",
            LABELLED,
            swapped | {"label": "B"},  # the same winner
            LABELLED,
            other,
            LABELLED | {"prompt": "else."},  # another text, the same group
            LABELLED | {"prompt": "third"},
            swapped | {"prompt": "third"},  # another winner
        ),
        name="x",
    )
    assert reasons(reading) == [Reason.DUPLICATE] * 2 + [Reason.CONFLICTING_LABEL] * 2
    assert reading.dropped["row"].to_pylist() == [1, 2, 5, 6]
    assert reading.dropped["detail"].to_pylist() == ["of x row 0", "of x row 0", "also x row 6", "also x row 5"]
    assert reading.dropped["pair_id"].null_count == 4
    assert len(set(reading.pairs["group"].to_pylist())) == 2


def test_sources_are_combined_and_their_twins_found() -> None:
    one = read_pairs(pa.Table.from_pylist([LABELLED, LABELLED | {"prompt": "x"}]), name="one")
    two = read_pairs(
        pa.Table.from_pylist([CHOSEN, CHOSEN | {"prompt": "x", "chosen": "no", "rejected": "hi"}]), name="two"
    )
    whole = combine([one, two])
    assert reasons(whole) == [Reason.CONFLICTING_LABEL, Reason.DUPLICATE, Reason.CONFLICTING_LABEL]
    assert whole.dropped.select(["source", "row"]).to_pylist() == [
        {"source": "one", "row": 1},
        {"source": "two", "row": 0},
        {"source": "two", "row": 1},
    ]
    assert whole.pairs["source"].to_pylist() == ["one"]
    with pytest.raises(DataError, match="two sources are named 'one'"):
        combine([one, one])


def test_parquet_of_every_text_type_gives_the_same_pairs(tmp_path: Path) -> None:
    rows = [LABELLED | {"prompt": f"p{i}", "label": "AB"[i % 2]} for i in range(9000)]
    table = pa.Table.from_pylist(rows)
    expected = check(read_pairs(jsonl(tmp_path / "x.jsonl", *rows), name="x")).pairs
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()):
        cast = pa.table({name: table[name].cast(kind) for name in table.column_names})
        assert read_pairs(cast, name="x").pairs == expected
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1000)
    assert read_pairs(tmp_path / "x.parquet", name="x").pairs == expected


def test_parquet_values_that_are_no_text_only_lose_their_row(tmp_path: Path) -> None:
    def text(values: list[bytes]) -> pa.Array:
        binary = pa.array(values, pa.binary())
        return pa.Array.from_buffers(pa.string(), len(values), binary.buffers())

    table = pa.table(
        {"prompt": text([b"a", b"\xff", b"c"]), "response_a": ["1"] * 3, "response_b": ["2"] * 3, "label": ["A"] * 3}
    )
    pq.write_table(table, tmp_path / "x.parquet")
    reading = read_pairs(tmp_path / "x.parquet", name="x")
    assert reasons(reading) == [Reason.BAD_ENCODING]
    assert reading.dropped["row"].to_pylist() == [1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no rows"),
        (b"\n \n", "has no rows"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:x\n", "Git LFS pointer"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"\x1f\x8brest", "damaged gzip"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        ('{"prompt": 1}'.encode("utf-16"), "UTF-16"),
        (b"PAR1 and nothing more", "can't be read"),
        (b"prompt,chosen,rejected\nx,y,z\n", "no line with a JSON object"),
        (b'[\n  {\n    "prompt": "x"\n  }\n]\n', "has the columns prompt; pairs need"),
        (
            b'{"instruction": "x", "output": "y"}\n',
            "has the columns instruction, output; pairs need prompt, chosen, rejected or",
        ),
        (b'{"chosen": "x", "rejected": "y"}\n', "has the columns chosen, rejected; pairs need"),
        (json.dumps(LABELLED | CHOSEN).encode(), "has both"),
    ],
)
def test_what_is_no_pairs_file_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        read_pairs(file, name="x")
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


def test_parquet_without_pairs_or_damaged_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    for table, words in (
        (pa.table({"a": [1]}), "has the columns a; pairs need"),
        (pa.table([["x"], ["y"]], names=["prompt", "prompt"]), "'prompt' twice"),
        (pa.Table.from_pylist([LABELLED]).slice(0, 0), "has no rows"),
    ):
        pq.write_table(table, file)
        with pytest.raises(DataError, match=words):
            read_pairs(file, name="x")
    rows = [LABELLED | {"prompt": f"p{i} {hashlib.sha256(bytes([i % 256])).hexdigest()}"} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), file, write_page_checksum=True)
    content = bytearray(file.read_bytes())
    content[2000:2040] = bytes(40)
    file.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        read_pairs(file, name="x")


def test_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(
        b"\xef\xbb\xbf"
        + json.dumps(LABELLED).encode()
        + b"\r\n\r\n"
        + json.dumps(LABELLED | {"prompt": "\u2028"}).encode()
    )
    assert reasons(read_pairs(file, name="x")) == [Reason.EMPTY_PROMPT]


def test_groups_ignore_case_spaces_and_unicode_form() -> None:
    same = ["Caf\u00e9 au  lait?", "cafe\u0301 AU\nlait? "]
    assert len({prompt_key((("system", str(i)), ("user", text))) for i, text in enumerate(same)}) == 1
    assert prompt_key((("user", "x"),)) != prompt_key((("user", "y"),))


def test_synthetic_table_is_read_whole() -> None:
    from tasks.data.synthetic import SCHEMA

    columns = [name for name in SCHEMA.names if name.startswith("rationale")]
    import tasks.data.synthetic as synthetic

    reading = check(read_pairs(generate(list(synthetic._RULES)[:3], 60, seed=1), name="demo"))
    assert reading.counts == {"in": 60, "kept": 60, "dropped": {}}
    assert reading.extras.column_names == ["pair_id", *columns]


def test_golden() -> None:
    rows = [LABELLED, CHOSEN | {"chosen": [user("q"), judge("é")], "prompt": "q", "rejected": [user("q"), judge("no")]}]
    readings = [read_pairs(pa.Table.from_pylist([row]), name=f"s{i}") for i, row in enumerate(rows)]
    content = json.dumps([reading.pairs.to_pylist() for reading in readings], sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(content.encode()).hexdigest()
    assert (formats.VERSION, digest[:16]) == (2, "8e4c4f68242f0444"), (
        "the same rows give other pairs: bump VERSION in tasks/data/formats.py"
    )


# What people's files hold where a text should be.
texts = st.one_of(st.sampled_from(["", " ", "A", "b", "tie", "x\0", "\ud800", "x" * 300]), st.text(max_size=8))
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["role", "content", "type"]), inner, max_size=3),
        st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": inner}), max_size=3
        ),
    ),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "prompt",
        "response_a",
        "response_b",
        "label",
        "chosen",
        "rejected",
        "group",
        "subset",
        "id",
        "rationale",
        "rationale\ud800",
    ]
)
records = st.one_of(
    st.builds(lambda change: LABELLED | change, st.dictionaries(names, junk, max_size=3)),
    st.builds(lambda change: CHOSEN | change, st.dictionaries(names, junk, max_size=3)),
    st.dictionaries(names, junk, max_size=4),
    junk,
)
lines = st.one_of(
    records.map(lambda record: json.dumps(record).encode()),
    records.map(lambda record: json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    records.map(lambda record: json.dumps(record, ensure_ascii=False).encode("utf-16-le", "surrogatepass")),
    st.tuples(records, st.integers(0, 60)).map(lambda cut: json.dumps(cut[0]).encode()[: cut[1]]),
    st.binary(max_size=30),
    st.just(b"[" * 5000),
)


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(lines, min_size=1, max_size=8), st.booleans())
@example([b"\xff\xfe"], False)
def test_no_file_crashes_or_loses_a_row(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], good: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "nasty.jsonl"
    whole = b"\n".join([json.dumps(LABELLED).encode()] * good + content)
    file.write_bytes(whole)
    try:
        reading = check(read_pairs(file, name="x"))
    except DataError as error:
        sentence = str(error)
        reading = None
    if reading is None:
        assert sentence.startswith(str(file))
        assert "\n" not in sentence
        return
    assert reading.counts["in"] == sum(bool(line.strip()) for line in whole.split(b"\n"))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.tuples(junk, junk, junk, junk), min_size=1, max_size=5))
def test_no_table_crashes_or_loses_a_row(rows: list[tuple[Any, ...]]) -> None:
    columns = {}
    for name, values in zip(LABELLED, zip(*rows, strict=True), strict=True):
        try:
            columns[name] = pa.array(list(values))
        except (pa.ArrowException, UnicodeError, OverflowError):
            columns[name] = pa.array([str(i) for i in range(len(rows))])
    assert check(read_pairs(pa.table(columns), name="x")).counts["in"] == len(rows)


@pytest.mark.parametrize(
    ("name", "rows", "duplicates", "groups"),
    [
        ("llmbar", 419, 0, 418),
        ("mtbench200", 200, 5, 75),
        ("humanevalpack", 984, 0, 984),
        ("gsm8k_solutions", 731, 0, 731),
        ("pandalm", 792, 30, 153),
        ("hh_harmless", 2303, 0, 2301),
    ],
)
def test_real_sets(name: str, rows: int, duplicates: int, groups: int) -> None:
    file = SHARED / "pairs" / f"{name}.parquet"
    if not file.exists():
        pytest.skip(f"needs the real pairs in {SHARED}")
    reading = check(read_pairs(file, name=name))
    assert reading.counts == {
        "in": rows,
        "kept": rows - duplicates,
        "dropped": {"duplicate": duplicates} if duplicates else {},
    }
    assert len(reading.pairs["group"].unique()) == groups


@pytest.mark.parametrize(
    ("name", "layout", "kept", "dropped", "groups"),
    [
        ("hh_divergent_and_empty.jsonl", "transcript", 0, {"diverging_prompt": 5, "empty_response": 4}, 0),
        ("llamafactory_dpo_en_demo.json", "sharegpt", 295, {"duplicate": 5}, 295),
        (
            "pandalm_testset.json",
            "annotators",
            760,
            {"bad_type": 6, "duplicate": 76, "empty_response": 52, "tie": 105},
            153,
        ),
    ],
)
def test_raw_files(name: str, layout: str, kept: int, dropped: dict[str, int], groups: int) -> None:
    file = SHARED / "raw" / name
    if not file.exists():
        pytest.skip(f"needs the raw files in {SHARED}")
    reading = check(read_pairs(file, name="x"))
    assert reading.layout.startswith(f"{layout}: ")
    assert reading.counts == {"in": kept + sum(dropped.values()), "kept": kept, "dropped": dropped}
    assert len(reading.pairs["group"].unique()) == groups


def test_pandalm_has_the_majorities_of_its_published_copy() -> None:
    """The same pairs as in `pairs/`, which wrote `true` as a text; every winner agrees."""
    raw, copy = SHARED / "raw" / "pandalm_testset.json", SHARED / "pairs" / "pandalm.parquet"
    if not raw.exists():
        pytest.skip(f"needs the raw files in {SHARED}")
    ours, theirs = (
        {pair["pair_id"]: pair["gold"] for pair in read_pairs(file, name="x").pairs.to_pylist()} for file in (raw, copy)
    )
    assert ours.items() <= theirs.items()
    assert len(theirs) - len(ours) == 2
