"""Call the command line: each command, its JSON, one sentence for each user error, and nothing heavy for reading."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small
from click.testing import CliRunner
from outer import config_file, described

from flows import terminal
from flows.cli import cli, main
from flows.iteration import star
from tasks.outcome import freeze_plan
from tasks.report import make_report, plot, write_report

ROOT = Path(__file__).resolve().parents[1]


class Made:
    """A finished run in a store, and the file it was started from."""

    def __init__(self, folder: Path) -> None:
        self.config = config_file(folder)
        self.store, run = small.start(described(folder))
        freeze_plan(self.store, run.run_id, described(folder), star)
        star(run)
        report = make_report(self.store, run.run_id)
        write_report(self.store, report, plot(report), run.work / "report")
        run.close("done")
        self.run_id, self.url = run.run_id, self.store.url


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def call(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments)
    assert done.exception is None, (arguments, done.output, done.exception)
    return done.stdout


def read_json(*arguments: str) -> Any:
    return json.loads(call(*arguments, "--json"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Call the program and give the one thing it says on its way out with code 2."""
    with pytest.raises(SystemExit) as left:
        main(lambda **settings: cli(arguments, **settings))
    told = capsys.readouterr()
    assert left.value.code == 2, told.err
    assert told.out == ""
    assert "Traceback" not in told.err
    return told.err


def test_ls(made: Made) -> None:
    assert made.run_id in call("ls", "--store", made.url)
    (run,) = read_json("ls", "--store", made.url)
    assert (run["run"], run["state"], run["iteration"], run["reused"]) == (made.run_id, "done", 1, 0)


def test_the_store_may_be_named_by_the_environment(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARWHEEL_STORE", made.url)
    assert read_json("ls")[0]["run"] == made.run_id


@pytest.mark.parametrize("name", ["{whole}", "small-2", "last"])
def test_status(made: Made, name: str) -> None:
    name = name.format(whole=made.run_id)
    assert "done" in call("status", name, "--store", made.url)
    assert read_json("status", name, "--store", made.url)["last_step"] == "score test"


def test_show(made: Made) -> None:
    told = call("show", "last", "--store", made.url)
    assert "checkpoint 1" in told
    assert "engine starts: 2" in told
    assert "truncation_rate" in told, "headers are whole where nobody's terminal limits the width"
    whole = read_json("show", "last", "--store", made.url)
    assert whole["engine_starts"] == 2
    assert {(one["judge"], one["suite"]) for one in whole["scores"]} == {
        (judge, suite) for judge in "01" for suite in ("dev", "test", "ood")
    }


def test_a_plan_tells_what_it_takes_and_show_what_it_took(made: Made) -> None:
    told = call("plan", str(made.config), "--set", "seed=7")
    assert "evaluate test" in told
    assert f"rates: measured in {made.run_id}" in told
    assert "engine starts: 2" in told
    whole = read_json("plan", str(made.config), "--set", "seed=7")["forecast"]
    assert whole["totals"]["engine_starts"] == 2
    assert whole["totals"]["tokens"]["low"] <= whole["totals"]["tokens"]["value"] <= whole["totals"]["tokens"]["high"]
    assert set(whole["suites"]) == {"dev", "test", "ood"}
    assert "planned at its start, and happened" in call("show", "last", "--plan", "--store", made.url)
    outcomes = read_json("show", "last", "--plan", "--store", made.url)
    assert outcomes[-1]["step"] == "in all"
    assert {"sample", "train", "engine start"} <= {one["step"] for one in outcomes}


def test_show_an_iteration(made: Made) -> None:
    told = call("show", "last", "1", "--store", made.url)
    assert "select" in told
    assert "prompts asked" in told
    assert "gate: go: No evidence" in told
    seen = read_json("show", "last", "1", "--store", made.url)
    assert {(one["judge"], one["suite"]) for one in seen["scores"]} == {("1", "dev"), ("1", "test"), ("1", "ood")}
    steps = seen["steps"]
    assert [one["step"] for one in steps][:4] == ["sample", "select", "pairs", "train"]
    assert all(one["in"] >= one["kept"] for one in steps if one["in"] is not None)


def test_show_a_step(made: Made) -> None:
    (manifest,) = read_json("show", "last", "1", "train", "--store", made.url)
    assert manifest["step"] == "train"
    assert set(manifest["artifacts"]) == {"train_log", "probes"}
    told = call("show", "last", "1", "train", "--store", made.url)
    assert "sft of pairs 1" in told
    assert manifest["key"] in told


def test_plan(made: Made) -> None:
    assert "0 to do" in call("plan", str(made.config))
    planned = read_json("plan", str(made.config))["steps"]
    assert {one["state"] for one in planned} == {"reused"}
    warmer = read_json("plan", str(made.config), "--set", "sample.temperature=0.5")["steps"]
    todo = [(one["iteration"], one["step"]) for one in warmer if one["state"] == "to do"]
    assert todo[0] == (1, "sample")
    assert (0, "evaluate") not in todo


def test_a_plan_names_what_differs(made: Made) -> None:
    for against in ((), ("--against", made.run_id)):
        warmer = read_json("plan", str(made.config), "--set", "sample.temperature=0.5", *against)["steps"]
        first = next(one for one in warmer if one["state"] == "to do")
        assert first["why"].endswith("): sample.temperature 1.0 → 0.5")


def test_explain(made: Made) -> None:
    told = call("explain", "last", "--store", made.url)
    assert "sample" in told
    assert "committed as" in told
    whole = read_json("explain", "last", "--store", made.url)
    assert {one["state"] for one in whole["steps"]} == {"reused"}
    assert whole["against"] == [made.run_id]
    (sample,) = read_json("explain", "last", "sample", "--store", made.url)["steps"]
    assert (sample["step"], sample["iteration"]) == ("sample", 1)


def test_a_plan_starts_and_writes_nothing(made: Made) -> None:
    def content() -> set[Path]:
        return {path for path in Path(made.url).rglob("*") if ".cache" not in path.parts}

    before = content()
    call("plan", str(made.config), "--set", "seed=7")
    assert content() == before


def test_config_commands(made: Made) -> None:
    assert "star-sft" in call("config", "list").split()
    assert "star-sft" in read_json("config", "list")
    assert "kind: scripted" in call("config", "show", str(made.config))
    assert read_json("config", "show", str(made.config))["engine"]["kind"] == "scripted"
    assert "is valid" in call("config", "validate", str(made.config))
    found = read_json("config", "validate", str(made.config))
    assert found["valid"] is True
    assert found["lengths"] == {"prompt": 1024 - 64, "written": 64, "whole": 1024}


def test_resume_of_a_finished_run_starts_nothing(made: Made) -> None:
    """No Prefect, no engine: where they can't be imported it says that all is done."""
    done = blocked("prefect", "torch", "vllm", command=("resume", "last", "--store", made.url))
    assert "is done; nothing is left to do" in done.stderr
    assert "checkpoint 1" in done.stdout


ERRORS = {
    "unknown config": (("run", "star-sfd"), ("star-sfd: is no preset and no file", "did you mean `star-sft`?")),
    "unknown key": (("plan", "{config}", "--set", "train.epoch=2"), ("train.epoch", "epochs")),
    "wrong value": (("run", "{config}", "--set", "iterations=0"), ("iterations",)),
    "unknown run": (("status", "nothing", "--store", "{store}"), ("no run is named nothing", "starwheel ls")),
    "missing store": (("ls", "--store", "{store}/not-there"), ("there is no store at", "not-there")),
    "ambiguous run": (("resume", "twin-", "--store", "{twins}"), ("it may be twin-", ", twin-")),
    "unknown iteration": (("show", "last", "9", "--store", "{store}"), ("has no steps in iteration 9",)),
    "unknown step": (("show", "last", "1", "trian", "--store", "{store}"), ("used no step 'trian'",)),
    "unknown step to explain": (("explain", "last", "trian", "--store", "{store}"), ("has no step `trian`",)),
    "unknown run to plan against": (("plan", "{config}", "--against", "x-"), ("no run is named x-",)),
    "unknown key to void": (("void", "abc", "--reason", "r", "--store", "{store}"), ("no step begins with `abc`",)),
    "foreign scheme": (("ls", "--store", "gs://bucket"), ("gs://", "use s3://bucket/prefix or a folder")),
    "unknown command": (("resum", "last"), ("No such command 'resum'",)),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_user_error_is_a_sentence(kind: str, made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, parts = ERRORS[kind]
    twins = tmp_path / "twins"
    if kind == "ambiguous run":
        for _ in range(2):
            small.start(described(tmp_path, name="twin", store=str(twins)))
    told = refused(capsys, *(one.format(config=made.config, store=made.url, twins=twins) for one in arguments))
    assert all(part in told for part in parts), told
    sentences = [line for line in told.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(sentences) == 1, told


def test_void_takes_a_key_as_show_prints_it(tmp_path: Path) -> None:
    made = Made(tmp_path)
    shown = next(one for one in read_json("show", "last", "1", "--store", made.url)["steps"] if one["step"] == "select")
    assert "is void" in call("void", shown["key"], "--reason", "a test", "--store", made.url)
    todo = [
        (one["iteration"], one["step"])
        for one in read_json("plan", str(made.config))["steps"]
        if one["state"] == "to do"
    ]
    assert todo[0] == (1, "select")


def test_a_store_is_not_made_by_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "ls", "--store", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_closed_pipe_is_no_error(made: Made) -> None:
    piped = f"{sys.executable} -m flows.cli show last 1 --json --store {made.url} | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def blocked(*libraries: str, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run a command where some libraries can't be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({libraries!r})); from flows.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


READING = {
    "plan": ("plan", "{config}", "--set", "sample.temperature=0.5"),
    "explain": ("explain", "last", "--store", "{store}"),
    "ls": ("ls", "--store", "{store}"),
    "status": ("status", "last", "--store", "{store}"),
    "show": ("show", "last", "--store", "{store}"),
    "show an iteration": ("show", "last", "1", "--store", "{store}"),
    "show a step": ("show", "last", "1", "score", "--store", "{store}"),
    "rows": ("rows", "last", "1", "judgments", "--contains", "A", "--full", "--store", "{store}"),
    "trace": ("trace", "last", "{pair}", "--store", "{store}"),
    "diff": ("diff", "last@0", "last@1", "--store", "{store}"),
    "sql": ("sql", "last", "SELECT count(*) FROM pairs", "--store", "{store}"),
    "open": ("open", "last", "1", "sft", "--as", "polars", "--store", "{store}"),
    "show the plan": ("show", "last", "--plan", "--store", "{store}"),
    "validate": ("config", "validate", "{config}"),
}


@pytest.mark.parametrize("name", READING)
def test_reading_commands_need_nothing_heavy(name: str, made: Made) -> None:
    pair_id = read_json("rows", "last", "0", "pairs", "--limit", "1", "--store", made.url)["rows"][0]["id"]
    command = tuple(one.format(config=made.config, store=made.url, pair=pair_id) for one in READING[name])
    heavy = ("prefect", "torch", "vllm", "trl", "peft", "transformers", "datasets", "s3fs", "botocore", "matplotlib")
    assert blocked(*heavy, command=command).stdout


def test_help_is_quick() -> None:
    """CPU time, the best of three: what else the machine does doesn't count."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "flows.cli", "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3, seconds


def test_version() -> None:
    assert "0.1.0" in call("--version")


def test_stored_text_is_shown_as_it_reads(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose texts carry markup, a colour, a title change, direction marks and a line end."""
    text = "[red]A[/red]\x1b[31mB\x1b]0;title\x07\u202eC\u200f\r\nD"
    counts = {"in": 4, "kept": 3, "tokens": 7, "seconds": 0.5}
    columns = ("step", "state", "dropped", "artifacts", "key")
    monkeypatch.setattr("tasks.history.iteration_steps", lambda *_: [{**dict.fromkeys(columns, text), **counts}])
    told = call("show", "last", "1", "--store", made.url)
    assert "[red]A[/red]" in told
    assert not set(told) & set("\x1b\x07\u202e\u200f\r")


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("[bold]x", "[bold]x"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        ("a\nb", "a\\nb"),
        ("größe 東京 🙂", "größe 東京 🙂"),
        (None, "–"),
        (0.12345, "0.123"),
        (7, "7"),
    ],
)
def test_plain_cells(cell: Any, shown: str) -> None:
    assert terminal.plain(cell) == shown


def test_titles_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_table(("[red]c[/red]",), [("x",)], title="s3://bucket/[red]\x1b[31mprefix")
    told = capsys.readouterr().out
    assert "[red]c[/red]" in told
    assert "s3://bucket/[red]" in told
    assert "\x1b" not in told


def test_progress_is_plain_text_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    listen = terminal.progress_listener()
    where = {"iteration": 1, "step": "train", "label": ""}
    listen({"event": "step", **where, "key": "0" * 64, "reused": True})
    listen({"event": "progress", **where, "done": 3, "total": 9, "unit": "steps", "loss": 0.5, "eta": 75})
    listen({"event": "progress", **where, "done": 4, "total": 9, "unit": "steps"})  # too soon for another line
    listen({"event": "failed", "task": "train 1", "message": "out of memory\x1b[2J"})
    assert capsys.readouterr().err.splitlines() == [
        f"reused  iteration 1 · train  {'0' * 12}",
        "        iteration 1 · train 3/9 steps · loss 0.500 · ETA 1:15",
        "failed  train 1: out of memory\\x1b[2J",
    ]


def test_an_unexpected_error_keeps_its_traceback() -> None:
    def broken(**_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main(broken)


def test_interrupts_leave_with_130() -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        main(interrupted)
    assert left.value.code == 130
