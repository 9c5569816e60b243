"""Call the commands that look inside: on a folder and on a bucket, as tables and as JSON, and with hostile text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from finished import Finished, finish
from rich.cells import cell_len

from flows import terminal
from flows.cli import cli, main
from tasks.engines.base import Response, Text
from tasks.engines.scripted import ScriptedEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_fsync")

DATA = {
    "sources": [{"name": "made", "generator": {"categories": ["capitals", "question"], "count": 50}}],
    "suites": [{"name": "ood", "generator": {"categories": ["quotes"], "count": 6}}],
}
SHORT: dict[str, Any] = {"iterations": 1, "bootstrap": None, "split": {"bootstrap": 0}, "data": DATA}


def call(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments)
    assert done.exception is None, (arguments, done.output, done.exception)
    return done.stdout


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finish(tmp_path_factory.mktemp("looked"), **SHORT)


COMMANDS = {
    "show": ("show", "last"),
    "show an iteration": ("show", "last", "1"),
    "show a step": ("show", "last", "1", "select"),
    "rows": ("rows", "last", "1", "judgments", "--status", "correct", "--limit", "3"),
    "rows in full": ("rows", "last", "1", "sft", "--full", "--limit", "2"),
    "flipped rows": ("rows", "last", "1", "judgments", "--flipped", "--limit", "2"),
    "trace": ("trace", "last", "{pair}"),
    "diff": ("diff", "last@0", "last@1", "--limit", "3"),
    "sql": ("sql", "last", "SELECT status, count(*) AS n FROM judgments GROUP BY ALL ORDER BY ALL"),
    "views": ("sql", "last"),
    "open": ("open", "last", "1", "sft"),
}


def filled(done: Finished, command: tuple[str, ...]) -> list[str]:
    pair_id = done.rows(1, "select", "selected")["pair_id"].sort()[0]
    return [*(one.format(pair=pair_id) for one in command), "--store", done.store.url]


def without_place(value: Any) -> Any:
    """Leave out what tells one run from another of the same content: ids, times, paths."""
    if isinstance(value, dict):
        changing = {
            "run",
            "run_id",
            "timings",
            "seconds",
            "files",
            "nonce",
            "created",
            "facts",
            "before",
            "now",
            "path",
        }
        return {name: without_place(one) for name, one in value.items() if name not in changing}
    return [without_place(one) for one in value] if isinstance(value, list) else value


def test_a_bucket_is_looked_into_like_a_folder(done: Finished, bucket: str, tmp_path: Path) -> None:
    there = finish(tmp_path, store=f"s3://{bucket}/runs", **SHORT)
    for name, command in COMMANDS.items():
        here = json.loads(call(*filled(done, command), "--json"))
        assert here, name
        assert without_place(json.loads(call(*filled(there, command), "--json"))) == without_place(here), name
        assert call(*filled(there, command)), name


def test_what_the_tables_say(done: Finished) -> None:
    told = {name: call(*filled(done, command)) for name, command in COMMANDS.items()}
    assert "steps computed" in told["show"]
    assert "prompts asked" in told["show an iteration"]
    assert "gate: go: No evidence" in told["show an iteration"]
    assert "completions of sample 1" in told["show a step"]
    assert "rows 1–3 of " in told["rows"]
    assert "completion" in told["rows in full"]
    assert "source row and split" in told["trace"]
    assert "paired tests clustered by prompt" in told["diff"]
    assert "pairs gained" in told["diff"]
    assert told["open"].strip().startswith(str(done.store.cache.root))
    assert "polars.read_parquet(['" in call(*filled(done, COMMANDS["open"]), "--as", "polars")


ERRORS = {
    "unknown artifact": (("rows", "last", "1", "judgements"), "there is no artifact 'judgements'; there are"),
    "unknown status": (("rows", "last", "1", "judgments", "--status", "bad"), "--status bad: there are correct, wrong"),
    "wrong id": (("trace", "last", "x"), "'x' is no row id: write PAIR"),
    "unknown pair": (("trace", "last", "pfffffffffffff"), "has no one pair pfffffffffffff"),
    "unknown judge": (("diff", "last", "last@9"), "has no scored judge 9; scored are 0, 1"),
    "unknown run": (("diff", "last", "nothing@1"), "no run is named nothing"),
    "no query": (("sql", "last", "DROP VIEW judgments"), "give one SELECT; a run is read, never changed"),
    "unknown view": (("sql", "last", "SELECT * FROM nothing"), "Table with name nothing does not exist; the views are"),
    "nothing to open": (("open", "last", "7", "sft"), "has no iteration 7; it has 0, 1"),
    "no earlier judge": (("rows", "last", "0", "judgments", "--flipped"), "has no scores of both the untrained judge"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_user_error_is_a_sentence(done: Finished, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    arguments, said = ERRORS[kind]
    with pytest.raises(SystemExit) as left:
        main(lambda **settings: cli([*arguments, "--store", done.store.url], **settings))
    told = capsys.readouterr()
    assert left.value.code == 2
    assert told.out == ""
    assert said in told.err
    assert len([line for line in told.err.splitlines() if line and not line.startswith(("Usage:", "Try "))]) == 1


def test_lost_steps_are_noted(tmp_path: Path) -> None:
    gone = finish(tmp_path, **SHORT)
    gone.store.void(gone.manifests[1, "score", "test"].key, "a test", "me")
    told = CliRunner().invoke(cli, ["sql", "last", "SELECT 1", "--store", gone.store.url])
    assert told.stderr == "note: void or lost, so left out: score 1 test\n"


# Hostile text: what a terminal might obey, what turns or breaks lines, markup, and much of it.

HOSTILE = (
    "<script>alert(1)</script> \x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \u202eright to left\u202c \u200f \x00null "
    "[red]markup[/red] \ttab \ue000 \u2028line \U000e0041tag\r\nnext  Ünïcode 東京 🙂 '; DROP VIEW x; --"
)
STORED = HOSTILE.replace("\x00", "")  # pairs with null bytes are dropped before; a judge may write them
LONG = 1_000_000


class HostileEngine(ScriptedEngine):
    """Write hostile rationales; the first sample of each prompt is a megabyte long."""

    def poll(self) -> list[Response]:
        return [
            Response(one.tag, tuple(map(_hostile, one.texts, range(len(one.texts))))) if one.texts else one
            for one in super().poll()
        ]


def _hostile(text: Text, sample: int) -> Text:
    padding = "x" * LONG if sample == 0 else ""
    return Text(f"{HOSTILE}{padding} {text.text}", text.finish_reason, text.n_tokens, text.logprob)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("hostile")
    file = folder / "pairs.jsonl"
    rows = [
        {
            "prompt": f"{STORED} {number}",
            "response_a": f"{STORED} one",
            "response_b": f"two {STORED}",
            "label": "AB"[number % 2],
            "subset": STORED,
        }
        for number in range(40)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    changes: dict[str, Any] = {
        **SHORT,
        "data": {"sources": [{"name": "made", "path": str(file)}], "suites": []},
        "model": {"max_len": 4096},
        "split": {"bootstrap": 0, "dev": 0.2, "test": 0.2},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.engines.scripted.ScriptedEngine", HostileEngine)
        return finish(folder, **changes)


SHOWN = {
    "rows": ("rows", "last", "1", "judgments", "--limit", "5"),
    "pairs": ("rows", "last", "0", "pairs", "--limit", "3"),
    "rows in full": ("rows", "last", "1", "judgments", "--full", "--limit", "5"),
    "training rows in full": ("rows", "last", "1", "sft", "--full", "--limit", "3"),
    "trace": ("trace", "last", "{pair}"),
    "diff": ("diff", "last@0", "last@1"),
    "sql": ("sql", "last", "SELECT c.text, p.prompt FROM completions c JOIN pairs p USING (pair_id) LIMIT 3"),
    "show a step": ("show", "last", "1", "score"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_hostile_text_is_shown_as_text(hostile: Finished, name: str) -> None:
    told = call(*filled(hostile, SHOWN[name]))
    assert all(char.isprintable() or char == "\n" for char in told)
    assert "<script>alert(1)</script>" in told
    assert r"\x1b[31mred" in told.replace("\n", "")
    assert len(told) < 20 * terminal.SHOWN_CHARACTERS
    boxed = [line for line in told.splitlines() if line.startswith(("│", "╭", "╰", "├"))]
    assert bool(boxed) == (name in {"rows in full", "training rows in full", "trace"})
    assert {cell_len(line) for line in boxed} <= {terminal.TEXT_WIDTH}
    assert all(line[-1] in "│╮╯┤" for line in boxed)
    assert max(map(cell_len, told.splitlines())) <= max(terminal.WIDTH, 20 * len(HOSTILE))


def test_a_megabyte_is_counted_and_json_has_it(hostile: Finished) -> None:
    command = ("rows", "last", "1", "judgments", "--step", "select", "--limit", "1", "--full")
    told = call(*filled(hostile, command))
    assert "more characters; --json has them" in told
    assert len(told) < 2 * terminal.SHOWN_CHARACTERS
    (row,) = json.loads(call(*filled(hostile, command), "--json"))["rows"]
    assert row["text"].startswith(HOSTILE)
    assert len(row["text"]) > LONG
    assert row["response_a"] == f"{STORED} one"


def test_hostile_text_is_found(hostile: Finished) -> None:
    whole = json.loads(call(*filled(hostile, ("rows", "last", "1", "judgments")), "--json"))["total"]
    for part in ("\x1b[31m", "'; DROP", "\u202e", "🙂", "[red]", "%"):
        command = ("rows", "last", "1", "judgments", "--contains", part, "--limit", "1")
        found = json.loads(call(*filled(hostile, command), "--json"))["total"]
        assert found == (0 if part == "%" else whole), part
    named = ("rows", "last", "1", "judgments", "--subset", STORED, "--limit", "1")
    assert json.loads(call(*filled(hostile, named), "--json"))["total"] == whole
