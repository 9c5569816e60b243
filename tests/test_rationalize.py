"""Rationales of a judge that was shown the answer: STaR-Rationalizer, and failed pairs of STaR-SFT and STaR-DPO."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
import small
from finished import Finished, finish

from configs.load import check
from configs.run import RationalizeConfig
from flows.iteration import star
from storage import failpoint
from storage.errors import TransientError
from storage.schema import JUDGMENT_ID
from tasks.engines.scripted import ScriptedEngine
from tasks.judge import hints, prompts
from tasks.plan import make_plan
from tasks.report import make_report

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.engines.base import Request, Response, Text

pytestmark = pytest.mark.usefixtures("no_fsync")

ID = list(JUDGMENT_ID)
HINT = RationalizeConfig().hint
SMALL: dict[str, Any] = {
    "data": {"sources": [{"name": "made", "generator": {"categories": ["capitals"], "count": 80}}], "suites": []},
    "split": {"dev": 0.05, "test": 0.05, "bootstrap": 4},
    "sample": {"n": 1, "order": "both"},
    "evaluate": {"votes": 1, "dev_votes": 1, "base": False},
}
SFT: dict[str, Any] = {**SMALL, "rationalize": {"failures": True, "n": 2, "max_share": 0.25}}
DPO: dict[str, Any] = {
    **SMALL,
    "method": "star-dpo",
    "sample": {"n": 2, "order": "both"},
    "pairs": {"max_per_pair": 4},
    "rationalize": {"failures": True, "n": 2, "max_share": 0.25, "off_policy_chosen": True},
}
RATIONALIZER: dict[str, Any] = {**SMALL, "method": "star-rationalizer"}


class Telling(ScriptedEngine):
    """Quote the hint in a quarter of what is written under one; keep what is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []
        self._hinted: set[int] = set()

    def add(self, request: Request) -> None:
        if request.sampling:
            self.asked.append(request)
        super().add(request)

    def poll(self) -> list[Response]:
        request = self._queue[0] if self._queue else None
        found = super().poll()
        if request is None or hint_in(request) is None:
            return found
        return [replace(one, texts=tuple(self._told(text, request) for text in one.texts)) for one in found]

    def _told(self, text: Text, request: Request) -> Text:
        if sum(request.ids) % 4:
            return text
        return replace(text, text=f"As asked to {hint_in(request)} {text.text}")


def hint_in(request: Request) -> str | None:
    """Give the hint that a request shows."""
    asked = bytes(request.ids).decode()
    return next((hints.worded(HINT, letter) for letter in "AB" if hints.worded(HINT, letter) in asked), None)


def loop(folder: Path, **changes: Any) -> tuple[Finished, list[Telling]]:
    """Run to the end; give the run and its engines, in the order of their starts."""
    engines: list[Telling] = []

    def start(*_: Any) -> Telling:
        engines.append(Telling())
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.jobs.entry.start_engine", start)
        return finish(folder, **changes), engines


RUNS = {"sft": SFT, "dpo": DPO, "rationalizer": RATIONALIZER}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Finished, list[Telling], Path]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in RUNS}
    return {name: (*loop(folder, **RUNS[name]), folder) for name, folder in folders.items()}


Runs = dict[str, tuple[Finished, list[Telling], "Path"]]
EACH = pytest.mark.parametrize("name", RUNS)


@EACH
def test_the_order_of_the_steps(runs: Runs, name: str) -> None:
    done, _, _ = runs[name]
    assert done.judge.number == 3
    order = [(one["iteration"], one["step"]) for one in done.events if one["step"] not in ("evaluate", "score")]
    asked = ["rationalize"] if name == "rationalizer" else ["sample", "rationalize"]
    expected = [(0, "base"), (0, "split"), (0, "bootstrap"), (0, "train")]
    for number in range(1, 4):
        expected += [(number - 1, "parity"), (number - 1, "gate")]
        expected += [(number, step) for step in (*asked, "select", "pairs", "train")]
    assert order == [*expected, (3, "parity"), (3, "gate")]


@EACH
def test_a_session_starts_one_engine(runs: Runs, name: str) -> None:
    done, engines, _ = runs[name]
    starts: dict[int, set[str]] = {}
    for (iteration, step, _), manifest in done.manifests.items():
        if step in ("parity", "evaluate", "sample", "rationalize"):
            number = iteration - (step in ("sample", "rationalize"))
            starts.setdefault(number, set()).add(manifest.facts["engine"]["start"])
    assert [len(starts[one]) for one in range(4)] == [1, 1, 1, 1]
    assert make_report(done.store, done.run.run_id).engine_starts == len(engines) == 4


@EACH
def test_only_failed_pairs_are_asked_again_and_all_with_the_answer(runs: Runs, name: str) -> None:
    done, engines, _ = runs[name]
    gold = {row["pair_id"]: row["gold"] for row in done.rows(0, "split", "pairs").to_dicts()}
    for number in done.iterations:
        hinted = done.rows(number, "rationalize", "completions")
        assert hinted.height > 0
        assert hinted["hinted"].all()
        expected = done.sets[f"part-{number}"]
        if name != "rationalizer":
            judged = done.rows(number, "select", "judgments").filter(~pl.col("hinted"))
            expected = set(judged["pair_id"]) - set(judged.filter(pl.col("status") == "correct")["pair_id"])
            assert 0 < len(expected) < len(done.sets[f"part-{number}"])
        assert set(hinted["pair_id"]) == expected
        assert hinted.group_by("pair_id", "order").len()["len"].unique().to_list() == [
            1 if name == "rationalizer" else 2
        ]
        assert set(hinted["order"]) == {"ab", "ba"}
    shown = Counter[tuple[str, str]]()
    for request in (one for engine in engines for one in engine.asked if hint_in(one)):
        letter = gold[request.tag[2]] if request.tag[3] == "ab" else "BA"["AB".index(gold[request.tag[2]])]
        assert hint_in(request) == hints.worded(HINT, letter)
        shown[request.tag[2], request.tag[3]] += 1
    written = pl.concat([done.rows(number, "rationalize", "completions") for number in done.iterations])
    assert shown == Counter(written.select("pair_id", "order").unique().rows())


@EACH
def test_no_hint_is_in_any_training_row(runs: Runs, name: str) -> None:
    """The hint is stripped from the prompt, and a text that quotes it is dropped with a reason."""
    done, _, _ = runs[name]
    artifact = "dpo" if name == "dpo" else "sft"
    plain = {(row["pair_id"], order): row["prompt"] for order in ("ab", "ba") for row in _rendered(done, order)}
    hinted_rows, quoting = 0, 0
    for number in done.iterations:
        rows = done.rows(number, "pairs", artifact)
        for row in rows.to_dicts():
            assert row["prompt"] == plain[row["pair_id"], row["order"]]
            for side in ("completion", "chosen", "rejected"):
                text = row.get(side, [{"content": ""}])[0]["content"]
                assert "xplain why" not in text
        hinted_rows += rows["chosen_hinted" if name == "dpo" else "hinted"].sum()
        if name == "dpo":
            assert not rows["rejected_hinted"].any()
        written = done.rows(number, "rationalize", "completions")
        told = written.filter(pl.col("text").str.contains("xplain why"))
        reasons = told.join(done.rows(number, "select", "dropped"), on=ID, how="inner")["reason"]
        assert len(reasons) == told.height
        assert all(reason == "quotes_hint" or reason.startswith("hinted_") for reason in reasons)
        quoting += (reasons == "quotes_hint").sum()
    assert hinted_rows > 0
    assert quoting > 0


def _rendered(done: Finished, order: str) -> list[dict[str, Any]]:
    pairs = done.store.read(done.manifests[0, "split", ""].artifact("pairs"))
    rows: list[dict[str, Any]] = prompts.render(pairs, [order] * pairs.num_rows, done.run.config.prompt).to_pylist()
    return rows


@EACH
def test_hinted_rows_reach_the_verdict_and_keep_to_their_share(runs: Runs, name: str) -> None:
    done, _, _ = runs[name]
    for number in done.iterations:
        selected = done.rows(number, "select", "selected")
        assert set(selected.filter("hinted")["status"]) <= {"correct"}
        side = "chosen_hinted" if name == "dpo" else "hinted"
        share = done.rows(number, "pairs", "dpo" if name == "dpo" else "sft")[side].mean()
        assert share == 1 if name == "rationalizer" else share <= 0.25
        assert done.manifests[number, "pairs", ""].facts["hinted"] == pytest.approx(
            share * done.manifests[number, "pairs", ""].facts["fresh"]
        )


@EACH
def test_the_funnel_counts_every_row(runs: Runs, name: str) -> None:
    done, _, _ = runs[name]
    for number in done.iterations:
        written = sum(
            manifest.artifact("completions").rows
            for (iteration, step, _), manifest in done.manifests.items()
            if iteration == number and step in ("sample", "rationalize")
        )
        counts = done.manifests[number, "select", ""].counts
        assert counts["in"] == written == counts["kept"] + sum(counts["dropped"].values())
        assert "hinted_wrong" in counts["dropped"]
        pairs = done.manifests[number, "pairs", ""].counts
        assert pairs["in"] == counts["kept"] == pairs["kept"] + sum(pairs["dropped"].values())


@EACH
def test_a_second_run_reuses_all_and_a_plan_knows_the_steps(runs: Runs, name: str) -> None:
    done, _, folder = runs[name]
    again, engines = loop(folder, **RUNS[name])
    assert all(one["reused"] for one in again.events)
    assert engines == []
    planned = make_plan(done.store, small.config(folder, **RUNS[name]), star)
    assert {one.state for one in planned} == {"reused"}
    rows = {one.rows for one in planned if one.step == "rationalize"}
    assert rows == {done.manifests[one, "rationalize", ""].artifact("completions").rows for one in done.iterations}


def test_a_plan_of_a_new_run_names_what_there_will_be(tmp_path: Path) -> None:
    for name, expected in (("sft", ["sample", "rationalize"]), ("rationalizer", ["rationalize"])):
        described = small.config(tmp_path / name, **RUNS[name])
        planned = make_plan(small.start(described)[0], described, star)
        assert [one.step for one in planned if one.iteration == 1][: len(expected) + 3] == [
            *expected,
            "select",
            "pairs",
            "train",
        ]
        assert {one.state for one in planned} == {"to do"}


def computed(folder: Path, **changes: Any) -> set[str]:
    """Run once more with changes; give the steps of the first iteration that were computed."""
    done, _ = loop(folder, **changes)
    return {one["step"] for one in done.events if not one["reused"] and one["iteration"] == 1}


LATER = {"select", "pairs", "train", "parity", "evaluate", "score", "gate"}


def test_what_a_change_redoes(tmp_path: Path) -> None:
    first = {**SFT, "iterations": 1}
    loop(tmp_path, **first)
    asked = first["rationalize"]
    assert computed(tmp_path, **first) == set()
    other = "Say why {verdict} wins."
    assert computed(tmp_path, **{**first, "rationalize": {**asked, "hint": other}}) >= {"rationalize", *LATER} - {
        "sample"
    }
    assert "sample" not in computed(tmp_path, **{**first, "rationalize": {**asked, "n": 3}})
    assert computed(tmp_path, **{**first, "rationalize": {**asked, "max_share": 0.001}}) == LATER
    assert computed(tmp_path, **{**first, "rationalize": {}}) <= LATER  # the samples alone
    shuffled = computed(tmp_path, **{**first, "data": {**first["data"], "shuffle_gold": True}})
    assert "rationalize" in shuffled  # what it shows is another letter
    assert "sample" not in shuffled


class Killed(BaseException):
    """Stand for the end of the process."""


def test_resume_after_kills_inside_rationalize(tmp_path: Path) -> None:
    """Killed at every store operation of the step, one after the other; nothing that is committed is redone."""
    changes = {**SFT, "iterations": 1, "sample": {**SFT["sample"], "shard_pairs": 8}}
    reference, _ = loop(tmp_path / "reference", **changes)
    keys = {name: reference.manifests[1, name, ""].key for name in ("sample", "rationalize")}
    killed: list[str] = []

    def hook(name: str) -> None:
        if keys["rationalize"] in name and name not in killed:
            killed.append(name)
            raise Killed(name)

    store, run = small.start(small.config(tmp_path, **changes))
    engines: list[Telling] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.jobs.entry.start_engine", lambda *_: engines.append(Telling()) or engines[-1])
        failpoint.install(hook)
        try:
            for _ in range(100):
                steps = f"steps/{keys['rationalize']}/"
                there = [one for one in store.backend.list(steps) if one.endswith(".json") and "claim" not in one]
                before = {one: store.backend.get(one) for one in there}
                try:
                    judge = star(run)
                    break
                except Killed:
                    again = [one for one in engines[-1].asked if one.tag[0] == keys["sample"]]
                    assert not again or len(engines) == 1
                    shards = {int(one[-10:-5]) for one in before if "/shards/" in one}
                    assert not shards & {one.tag[1] for one in engines[-1].asked if one.tag[0] == keys["rationalize"]}
                    assert {one: store.backend.get(one) for one in before} == before
                    run = small.start(run.config, run_id=run.run_id)[1]
        finally:
            failpoint.install(None)
    assert judge.model == reference.judge.model
    assert {name.split()[0] for name in killed} >= {"put_new", "put_file", "write", "commit", "commit_shard"}
    assert len(killed) > 12
    for name, key in keys.items():
        found, expected = store.manifest(key), reference.manifests[1, name, ""]
        assert found is not None
        assert found.attempt == 0
        assert found.artifact("completions").digest == expected.artifact("completions").digest


def test_an_engine_that_dies_while_rationalizing_is_resumed_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(Telling):
        def poll(self) -> list[Response]:
            if sum(hint_in(one) is not None for one in self.asked) > 3:
                raise TransientError("the engine died")
            return super().poll()

    described = small.config(tmp_path, **{**SFT, "iterations": 1})
    monkeypatch.setattr("tasks.jobs.entry.start_engine", lambda *_: Dying())
    store, run = small.start(described)
    with pytest.raises(TransientError, match="died"):
        star(run)
    engine = Telling()
    monkeypatch.setattr("tasks.jobs.entry.start_engine", lambda *_: engine)
    assert star(small.start(described, run_id=run.run_id)[1]).number == 1
    sampled = [one for one in store.run_log(run.run_id).records() if one.get("step") == "sample"]
    assert len(sampled) == 1
    assert not [one for one in engine.asked if one.tag[0] == sampled[0]["key"]]


def test_where_no_pair_failed_nothing_is_asked(tmp_path: Path) -> None:
    changes = {**SFT, "iterations": 1, "sample": {"n": 40, "order": "both"}, "evaluate": {"base": False}}
    done, engines = loop(tmp_path, **changes)
    manifest = done.manifests[1, "rationalize", ""]
    assert manifest.artifact("completions").rows == 0
    assert manifest.counts == {"in": 0, "kept": 0, "dropped": {}}
    assert not [one for engine in engines for one in engine.asked if hint_in(one)]
    assert {one.state for one in make_plan(done.store, small.config(tmp_path, **changes), star)} == {"reused"}


# The pure cores.


def test_a_config_says_what_can_not_be(tmp_path: Path) -> None:
    for name, changes in RUNS.items():
        problems = check(small.config(tmp_path, **changes))
        assert problems == [], name
