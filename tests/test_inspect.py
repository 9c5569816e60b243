"""`starwheel data inspect` shows what a file holds, quickly, as plain text, and a run reads it the same way."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import small
from click.testing import CliRunner
from test_files import csv_text
from test_formats import SHARED, jsonl

from flows.cli import cli, main
from flows.iteration import star
from tasks.data.formats import read_pairs
from tasks.data.profile import make_profile, token_counter
from tasks.history import read_history

if TYPE_CHECKING:
    from conftest import S3Server

ROOT = Path(__file__).resolve().parents[1]
# Two prompts of three and one pairs: lengths 1 and 3, 3 and 1, 2 and 2; the last has more lines on the worse side.
ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "response_a": "abc", "response_b": "a", "label": "A", "subset": "s"},
    {"prompt": "one", "response_a": "x", "response_b": "xyz", "label": "A", "subset": "s"},
    {"prompt": "one", "response_a": "pq", "response_b": "\np", "label": "A", "subset": "t"},
    {"prompt": "other", "response_a": "abc", "response_b": "abcd", "label": "B", "subset": "s"},
    {"prompt": "tied", "response_a": "m", "response_b": "n", "label": "tie", "subset": "s"},
    {"prompt": "", "response_a": "m", "response_b": "n", "label": "A", "subset": "s"},
]


def call(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ("data", "inspect", *arguments))
    assert done.exception is None, (arguments, done.output, done.exception)
    return done.stdout


def test_what_is_told_of_a_file(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", *ROWS)
    told = json.loads(call(str(file), "--json"))
    assert told["file"] == str(file)
    assert told["bytes"] == file.stat().st_size
    assert told["layout"] == "labelled: prompt, response_a, response_b, label (jsonl)"
    assert (told["rows"], told["kept"], told["dropped"]) == (6, 4, {"empty_prompt": 1, "tie": 1})
    assert told["why"] == {"empty_prompt": "row 5: no user message with text", "tie": "row 4: label 'tie'"}
    assert (told["groups"], told["multi_turn"], told["gold_a"]) == (2, 0, 3)
    assert told["subsets"] == {"s": 3, "t": 1}
    assert told["lengths"] == {
        "prompt": {"mean": 3.5, "median": 3, "p95": 5, "max": 5},
        "better": {"mean": 2.5, "median": 3, "p95": 4, "max": 4},
        "worse": {"mean": 2.2, "median": 3, "p95": 3, "max": 3},
    }
    assert {one["judge"]: (one["accuracy"], one["n"], one["clusters"]) for one in told["baselines"]} == {
        "always A": (0.75, 4, 2),
        "longer answer": (0.625, 4, 2),  # right, wrong, as long, right
        "shorter answer": (0.375, 4, 2),
        "more lines": (0.375, 4, 2),  # three can't be told and one is wrong
    }
    assert all(0 <= one["low"] <= one["accuracy"] <= one["high"] <= 1 for one in told["baselines"])
    assert [one["better"] for one in told["examples"]] == ["abc", "x", "pq"]


def test_the_same_as_tables(tmp_path: Path) -> None:
    told = call(str(jsonl(tmp_path / "x.jsonl", *ROWS)))
    for words in (
        "6 rows, 4 pairs of 2 groups, 0 with several turns",
        "row 4: label 'tie'",
        "gold is A in 3 of 4 pairs, 75.0 %",
        "longer answer",
        " ↵ p",
    ):
        assert words in told, told


def test_a_file_without_a_pair_is_told_of_too(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", *ROWS[4:])
    assert "2 rows, 0 pairs of 0 groups" in call(str(file))
    assert json.loads(call(str(file), "--json"))["baselines"] == []


def test_nothing_of_a_file_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    evil = "[red]A[/red]\x1b[31mB\x1b]0;title\x07\u202eC\u200f\x9bD\r"
    row = ROWS[0] | {"prompt": evil, "response_a": evil, "subset": evil}
    file = jsonl(tmp_path / "x.jsonl", row, ROWS[1], row | {"label": evil})
    for options in ((), ("--json",)):
        told = call(str(file), *options)
        assert not set(told) & set("\x1b\x07\u202e\u200f\x9b\r"), options
        assert "[red]A[/red]" in told
    assert json.loads(told)["examples"][0]["prompt"] == evil


def test_lengths_in_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = jsonl(tmp_path / "x.jsonl", ROWS[0] | {"response_a": "a b a"})
    for named in (tmp_path, tmp_path / "tokenizer.json"):
        told = json.loads(call(str(file), "--json", "--tokenizer", str(named)))
        assert told["unit"] == "tokens"
        assert told["lengths"]["better"]["max"] == 3
    reading = read_pairs(file, name="x")
    assert make_profile(reading, count=token_counter(str(tmp_path)), unit="tokens").lengths["worse"]["max"] == 1


ERRORS = {
    "no file": (("{folder}/none.jsonl",), "{folder}/none.jsonl does not exist"),
    "a folder": (("{folder}",), "{folder} is a folder: name one file of pairs in it"),
    "unpaired": (("{folder}/unpaired.jsonl",), "{folder}/unpaired.jsonl is unpaired"),
    "format": (("{folder}/x.jsonl", "--format", "hh"), "'hh' is no format that is read: chosen, transcript"),
    "file": (("{folder}/x.jsonl", "--file", "xlsx"), "'xlsx' is no format that is read: parquet, json"),
    "column": (("{folder}/x.jsonl", "--column", "prompt"), "write OURS=COLUMN"),
    "no column": (("{folder}/x.jsonl", "--column", "prompt=nope"), "has no column 'nope' to take as `prompt`"),
    "tokenizer": (("{folder}/x.jsonl", "--tokenizer", "{folder}/none"), "{folder}/none is no tokenizer"),
    "scheme": (("gs://bucket/x",), "give a local path or s3://bucket/key"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_user_error_is_a_sentence(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(tmp_path / "x.jsonl", ROWS[0])
    jsonl(tmp_path / "unpaired.jsonl", {"prompt": "q", "completion": "x", "label": True})
    arguments, words = ERRORS[kind]
    with pytest.raises(SystemExit) as left:
        main(
            lambda **settings: cli(("data", "inspect", *(one.format(folder=tmp_path) for one in arguments)), **settings)
        )
    told = capsys.readouterr()
    assert left.value.code == 2
    assert told.out == ""
    assert words.format(folder=tmp_path) in told.err
    assert len([line for line in told.err.splitlines() if line and not line.startswith(("Usage:", "Try "))]) == 1


def test_it_is_quick_and_loads_nothing_heavy(tmp_path: Path) -> None:
    """CPU time, the best of three: neither what else the machine does nor compiling at the first start counts."""
    file = jsonl(tmp_path / "x.jsonl", *ROWS)
    heavy = ("prefect", "torch", "vllm", "trl", "peft", "transformers", "datasets", "s3fs", "matplotlib", "pydantic")
    code = f"import sys; sys.modules.update(dict.fromkeys({heavy!r})); from flows.cli import main; main()"
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call = [sys.executable, "-c", code, "data", "inspect", str(file)]
        done = subprocess.run(call, cwd=ROOT, env=compiled, capture_output=True, text=True, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "6 rows, 4 pairs" in done.stdout, done.stderr
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1, seconds


def test_an_object_is_looked_into(ministack: S3Server, bucket: str) -> None:
    ministack.client.put_object(Bucket=bucket, Key="rows.csv.gz", Body=gzip.compress(csv_text(ROWS).encode()))
    told = json.loads(call(f"s3://{bucket}/rows.csv.gz", "--json"))
    assert told["layout"].endswith("(csv, gzipped)")
    assert (told["file"], told["kept"]) == (f"s3://{bucket}/rows.csv.gz", 4)


def test_a_run_reads_a_source_as_its_config_says(tmp_path: Path) -> None:
    """The column `label` of this file is another one's; the run takes `preferred`, as told."""
    rows = [
        {"q": f"q {number}", "left": f"good {number}", "right": f"bad {number}", "preferred": "A", "label": "B"}
        for number in range(60)
    ]
    (tmp_path / "rows.tsv.gz").write_bytes(gzip.compress(csv_text(rows, "\t").encode()))
    columns = {"prompt": "q", "response_a": "left", "response_b": "right", "label": "preferred"}
    source = {"name": "mine", "path": str(tmp_path / "rows.tsv.gz"), "format": "labelled", "columns": columns}
    described = small.config(
        tmp_path, iterations=1, data={"sources": [source], "suites": []}, bootstrap=None, split={"bootstrap": 0}
    )
    store, run = small.start(described)
    star(run)
    (used,) = read_history(store, run.run_id).of("split")
    manifest = store.manifest(used.key)
    assert manifest is not None
    pairs = store.read(manifest.artifact("pairs")).to_pylist()
    assert len(pairs) == 60
    assert {pair["gold"] for pair in pairs} == {"A"}


@pytest.mark.parametrize("name", sorted(path.name for path in SHARED.glob("*/*") if path.parent.name != "extras"))
def test_real_files_are_described(name: str) -> None:
    (file,) = SHARED.glob(f"*/{name}")
    told = json.loads(call(str(file), "--json"))
    assert told["rows"] == told["kept"] + sum(told["dropped"].values())
    assert all(one["n"] == told["kept"] for one in told["baselines"])
    if name == "llmbar.parquet":
        longer = next(one for one in told["baselines"] if one["judge"] == "longer answer")
        assert round(longer["accuracy"], 2) == 0.27  # as its authors' set is described
