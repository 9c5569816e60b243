"""Explain: what differs is named as a person would name it, later steps are compared too, nothing is written."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import small

from flows.iteration import star
from tasks.differences import Known, differences
from tasks.earlier import earlier_runs, read_earlier
from tasks.explain import Explained, Explanation, explain
from tasks.history import read_history
from tasks.plan import make_plan
from tasks.step import Step

if TYPE_CHECKING:
    from pathlib import Path

    from storage.store import Store

pytestmark = pytest.mark.usefixtures("no_fsync")

ONE_ITERATION = {"iterations": 1, "evaluate": {"base": False}}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Give a folder with a store that holds a whole small run, and the run's id."""
    folder = tmp_path_factory.mktemp("first")
    _, run = small.start(small.config(folder, **ONE_ITERATION))
    star(run)
    return folder, run.run_id


class Explainer:
    """Explain changed configs against the first run, on a copy of its store."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder, self.run_id = folder, run_id
        self.store: Store = small.start(self.config())[0]

    def config(self, **changes: Any) -> Any:
        return small.config(self.folder, **{**ONE_ITERATION, **changes})

    def __call__(self, **changes: Any) -> Explanation:
        earlier = read_earlier(self.store, [read_history(self.store, self.run_id)])
        return explain(self.store, self.config(**changes), star, earlier)


@pytest.fixture
def explainer(first: tuple[Path, str], tmp_path: Path) -> Explainer:
    folder, run_id = first
    shutil.copytree(folder, tmp_path / "copy")
    return Explainer(tmp_path / "copy", run_id)


def by_state(found: Explanation) -> dict[str, list[Explained]]:
    states: dict[str, list[Explained]] = {}
    for one in found.steps:
        states.setdefault(one.state, []).append(one)
    return states


def test_an_unchanged_config_is_reused_whole(explainer: Explainer) -> None:
    states = by_state(explainer())
    assert set(states) == {"reused"}
    assert all(one.why[0].startswith("committed as ") for one in states["reused"])


def test_another_temperature_is_named_and_what_follows_from_it_too(explainer: Explainer) -> None:
    states = by_state(explainer(sample={"temperature": 0.7}))
    (sample,) = states["stale"]
    assert (sample.step, sample.iteration, sample.why) == ("sample", 1, ("sample.temperature 1.0 → 0.7",))
    assert sample.against is not None
    assert sample.against.startswith("sample 1 (")
    follows = {one.step: one.why for one in states["follows"]}
    assert {"select", "pairs", "train", "parity", "evaluate", "score", "gate"} == set(follows)
    assert follows["select"] == ("made again before it: sample 1",)
    assert follows["train"] == ("made again before it: pairs 1",)
    assert all(one.iteration == 1 for one in states["follows"])
    assert "waits" not in states


def test_two_changes_are_each_named_where_they_count(explainer: Explainer) -> None:
    stale = {one.step: one for one in by_state(explainer(sample={"temperature": 0.7}, train={"epochs": 2}))["stale"]}
    assert set(stale) == {"train", "sample"}
    assert stale["train"].why[0] == "train.epochs 1.0 → 2.0"
    assert explainer(train={"epochs": 2}).steps != explainer().steps


def test_a_prompt_is_named_by_its_words(explainer: Explainer) -> None:
    stale = {one.step: one for one in by_state(explainer(prompt={"system": "Judge well."}))["stale"]}
    assert "prompt.system Judge. → Judge well." in stale["sample"].why
    assert "prompt.system Judge. → Judge well." in stale["split"].why


def test_inputs_are_named_by_what_they_are_of(explainer: Explainer) -> None:
    found = explainer(data={"sources": [{"name": "made", "generator": {"categories": ["capitals"], "count": 130}}]})
    split = next(one for one in found.steps if one.step == "split")
    assert split.state == "stale"
    assert "data.sources.0.generator.count 120 → 130" in split.why

    (explainer.folder / "base" / "chat_template.jinja").write_text("{{ messages }}")
    found = explainer()
    base = next(one for one in found.steps if one.step == "base")
    assert base.state == "stale"
    assert base.why[0].startswith("files.chat_template.jinja (not set) → ")
    split = next(one for one in found.steps if one.step == "split")
    assert (split.state, split.why) == ("follows", ("made again before it: base 0",))


def test_digests_of_other_runs_are_named(explainer: Explainer) -> None:
    star(small.start(explainer.config(train={"epochs": 2}))[1])
    found = explainer(train={"epochs": 2})
    assert {one.state for one in found.steps} == {"reused"}
    parity = next(one for one in found.steps if (one.step, one.iteration) == ("parity", 1))
    lines = [line for line in parity.why if line.startswith("input model: checkpoint 1 ")]
    assert len(lines) == 1
    assert " → " in lines[0]


def test_more_votes_are_compared_with_the_nearest_block(explainer: Explainer) -> None:
    found = explainer(evaluate={"votes": 3, "base": False})
    states = by_state(found)
    assert {one.step for one in states["stale"]} == {"evaluate"}
    assert all("votes 2 → 3" in one.why for one in states["stale"])
    assert {"sample", "train"} <= {one.step for one in states["reused"]}, "what doesn't wait for them is looked at"


def test_a_voided_step_is_missing(explainer: Explainer) -> None:
    used = next(read_history(explainer.store, explainer.run_id).of("select"))
    explainer.store.void(used.key, "lost", "a test")
    select = next(one for one in explainer().steps if one.step == "select")
    assert select.state == "missing"
    assert "attempt 0, which an earlier run used, is void or lost" in select.why


def test_without_an_earlier_run_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    described = small.config(tmp_path, **ONE_ITERATION)
    store, _ = small.start(described)
    found = explain(store, described, star, read_earlier(store, []))
    assert found.steps[0].state == "missing"
    assert {one.state for one in found.steps[1:]} == {"waits"}


def test_versions_that_differ_are_warned_of(explainer: Explainer, monkeypatch: pytest.MonkeyPatch) -> None:
    import tasks.explain

    assert explainer().warnings == ()
    here = tasks.explain.software()
    monkeypatch.setattr(
        tasks.explain, "software", lambda: {**here, "versions": {**here["versions"], "pyarrow": "0.0.1"}}
    )
    (warning,) = explainer().warnings
    assert warning.startswith("pyarrow ")
    assert " → 0.0.1 since base 0, " in warning


def test_explaining_and_planning_write_nothing(explainer: Explainer) -> None:
    before = list(explainer.store.backend.list(""))
    explainer(sample={"temperature": 0.7})
    assert list(explainer.store.backend.list("")) == before


def test_a_plan_says_why(explainer: Explainer) -> None:
    earlier = read_earlier(explainer.store, [read_history(explainer.store, explainer.run_id)])
    planned = make_plan(explainer.store, explainer.config(sample={"temperature": 0.7}), star, earlier)
    first = next(one for one in planned if one.state == "to do")
    assert first.why.startswith("differs from sample 1 (")
    assert first.why.endswith("): sample.temperature 1.0 → 0.7")
    after = [one.why for one in planned if one.state == "to do"][1:]
    assert set(after) == {"its inputs are still to be made"}


def test_runs_of_a_name_come_latest_first(tmp_path: Path) -> None:
    store, _ = small.start(small.config(tmp_path, **ONE_ITERATION))
    config = small.config(tmp_path).model_dump(mode="json")
    made = [store.create_run(name, config, code_version="1") for name in ("small-er", "small")]
    assert set(earlier_runs(store, "small-er")) == {made[0]}
    runs = earlier_runs(store, "small")
    assert len(runs) == 2
    assert runs == sorted(runs, key=lambda one: one.rsplit("-", 2)[1:], reverse=True)
    assert earlier_runs(store, "small", before=runs[0]) == runs[1:]


@pytest.mark.parametrize(
    ("then", "now", "line"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b 1 → 2"),
        ({"a": 1}, {}, "a 1 → (not set)"),
        ({"a": None}, {"a": {"r": 4}}, 'a null → {"r": 4}'),
        ({"a": ["x"]}, {"a": ["x", "y"]}, 'a ["x"] → ["x", "y"]'),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, "a.1.b 2 → 3"),
        ({"a": "0" * 64}, {"a": "f" * 64}, "a 00000000 → ffffffff"),
        ({"a": "x\ny"}, {"a": ""}, 'a "x\\ny" → ""'),
        ({"a": "x" * 99}, {"a": "y"}, f"a {'x' * 59}… → y"),
    ],
)
def test_lines(then: dict[str, Any], now: dict[str, Any], line: str) -> None:
    parts = [Step("s", 1, {}, side).key_parts for side in (now, then)]
    assert differences(parts[0], parts[1], Known()) == [line]
    assert differences(parts[0], json.loads(json.dumps(parts[0])), Known()) == []


def test_named_inputs_and_versions() -> None:
    known = Known(names={"a" * 64: "checkpoint 1", "b" * 64: "checkpoint 1", "c" * 64: "the base model"})
    steps = [Step("s", number, {"model": one * 64, "x": None}, {}) for number, one in enumerate("abc", start=1)]
    one, two, three = (step.key_parts for step in steps)
    assert differences(two, one, known) == [
        "version of the step 1 → 2",
        "input model: checkpoint 1 aaaaaaaa → bbbbbbbb",
    ]
    assert differences(three, two, known)[1] == "input model: checkpoint 1 bbbbbbbb → the base model cccccccc"
