"""What a session does with odd sets: none to evaluate, two that are the same, prompts that grow too long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from configs.load import check
from flows.iteration import star
from storage.store import open_store
from tasks.engines.base import Response
from tasks.engines.scripted import ScriptedEngine
from tasks.history import manifest_of, read_history
from tasks.plan import make_plan
from tasks.run import create_run
from tests import small

if TYPE_CHECKING:
    from tasks.engines.base import Request

ROOT = Path(__file__).parents[1]


def scores(store: Any, run_id: str) -> set[str]:
    return {used.label for used in read_history(store, run_id).of("score")}


def test_without_dev_pairs_the_loop_goes_on(tmp_path: Path) -> None:
    store, run = small.start(small.config(tmp_path, split={"dev": 0.0}, iterations=1))
    assert star(run).number == 1
    gates = [manifest_of(store, used) for used in read_history(store, run.run_id).of("gate")]
    assert [one.facts["decision"] for one in gates if one] == ["go", "go"]
    assert "dev" not in scores(store, run.run_id)


def test_a_suite_whose_pairs_are_all_too_long_is_left_out(tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    row = '{{"prompt": "{0} {1}", "response_a": "a", "response_b": "b", "label": "A"}}\n'
    long.write_text("".join(row.format("word " * 400, number) for number in range(3)))
    suites = [*small.SECTIONS["data"]["suites"], {"name": "long", "path": str(long)}]
    store, run = small.start(small.config(tmp_path, data={"suites": suites}, iterations=1))
    assert star(run).number == 1
    assert scores(store, run.run_id) == {"dev", "test", "ood", "base test", "base ood"}


def test_two_suites_of_the_same_pairs_are_asked_once_and_scored_twice(tmp_path: Path) -> None:
    suite = small.SECTIONS["data"]["suites"][0]
    twins = [suite, {**suite, "name": "twin"}]
    store, run = small.start(small.config(tmp_path, data={"suites": twins}, iterations=1))
    star(run)
    assert {"ood", "twin"} <= scores(store, run.run_id)


@pytest.mark.parametrize("name", ["dev", "test", "bootstrap", "part-1"])
def test_the_names_of_the_splits_are_taken(tmp_path: Path, name: str) -> None:
    suite = {**small.SECTIONS["data"]["suites"][0], "name": name}
    problems = check(small.config(tmp_path, data={"suites": [suite]}))
    assert any(f"`{name}`" in one for one in problems), problems


def test_a_forced_choice_that_can_not_be_asked_is_a_row_without_probability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Narrow(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.refused: list[Response] = []

        def add(self, request: Request) -> None:
            if request.letters and not request.sampling:
                self.refused.append(Response(request.tag, error="too long"))
            else:
                super().add(request)

        def poll(self) -> list[Response]:
            refused, self.refused = self.refused, []
            return refused + super().poll()

    monkeypatch.setattr("tasks.jobs.entry.start_engine", lambda context, plan, first: Narrow())
    store, run = small.start(small.config(tmp_path, iterations=1))
    star(run)
    evaluated = manifest_of(store, next(read_history(store, run.run_id).of("evaluate")))
    assert evaluated is not None
    rows = store.read(evaluated.artifact("completions")).to_pylist()
    assert rows
    assert all(row["prob_a"] is None and row["error"] is None for row in rows)


@pytest.mark.parametrize("adapter", ["serve", "merge"])
def test_a_finished_run_is_planned_as_reused_whole(tmp_path: Path, adapter: str) -> None:
    described = small.config(tmp_path, engine={"adapter": adapter}, iterations=1)
    store, run = small.start(described)
    star(run)
    assert [one for one in make_plan(store, described, star) if one.state != "reused"] == []


def test_paths_of_a_run_hold_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job runs in the checkout, a resume anywhere."""
    rows = '{{"prompt": "q{0}", "response_a": "a{0}", "response_b": "b{0}", "label": "{1}"}}\n'
    (tmp_path / "pairs.jsonl").write_text("".join(rows.format(number, "AB"[number % 2]) for number in range(60)))
    monkeypatch.chdir(tmp_path)
    described = small.config(
        Path(), data={"sources": [{"name": "file", "path": "pairs.jsonl"}], "suites": []}, iterations=1
    )
    described = type(described).model_validate(
        {**described.model_dump(mode="json"), "bootstrap": None, "store": "store"}
    )
    store = open_store("store")
    run_id = create_run(store, described)
    frozen = store.run_config(run_id)
    assert frozen["data"]["sources"][0]["path"] == str(tmp_path / "pairs.jsonl")
    assert all(Path(frozen[name]).is_absolute() for name in ("store", "work"))
    assert Path(frozen["model"]["base"]).is_absolute()


def test_void_lets_a_step_be_computed_again(tmp_path: Path) -> None:
    store, run = small.start(small.config(tmp_path, iterations=1))
    star(run)
    used = next(read_history(store, run.run_id).of("select"))
    command = [sys.executable, "-m", "flows.cli", "void", used.key, "--reason", "test", "--store", store.url]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert store.manifest(used.key) is None
    star(small.start(run.config, run_id=run.run_id)[1])
    again = store.manifest(used.key)
    assert again is not None
    assert again.attempt == 1


def test_a_run_of_another_version_does_not_hide_the_others(tmp_path: Path) -> None:
    store, run = small.start(small.config(tmp_path, iterations=1))
    foreign = store.create_run("foreign", {**run.config.model_dump(mode="json"), "later": 1}, code_version="9.9")
    command = [sys.executable, "-m", "flows.cli", "ls", "--store", store.url]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "unreadable" in done.stdout
    assert run.run_id in done.stdout
    assert foreign in done.stdout
