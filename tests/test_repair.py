"""Broken completions are mended for training alone: truncated ones go on from their text, unparsed ones are redrawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
import small
from click.testing import CliRunner

from configs.check import check
from configs.load import ConfigError
from configs.run import Method
from flows.cli import cli
from flows.iteration import star
from storage.schema import JUDGMENT_ID
from tasks import generation
from tasks.engines.base import Request, Response, Sampling, Text, too_long
from tasks.engines.scripted import ScriptedEngine
from tasks.generation import Begun, mended
from tasks.history import broken_completions, read_history
from tasks.judge import frames, verdict

if TYPE_CHECKING:
    from pathlib import Path

    from storage.manifest import Manifest
    from storage.store import Store

pytestmark = pytest.mark.usefixtures("no_fsync")

MEND = {"tokens": 40, "redraws": 3}
ROW = {
    "pair_id": "p",
    "checkpoint": "m",
    "order": "ab",
    "sample": 2,
    "hinted": False,
    "text": "Response A is",
    "finish_reason": "length",
    "n_tokens": 8,
    "logprob": -2.0,
    "prob_a": None,
    "error": None,
}


def made(folder: Path, **changes: Any) -> tuple[Store, str]:
    store, run = small.start(small.config(folder, **changes))
    star(run)
    return store, run.run_id


def manifests(store: Store, run_id: str, step: str) -> dict[int, Manifest]:
    found = {used.iteration: store.manifest(used.key) for used in read_history(store, run_id).of(step)}
    return {iteration: one for iteration, one in found.items() if one is not None}


def test_exactly_the_broken_rows_are_mended_and_stand_in_for_what_they_were(tmp_path: Path) -> None:
    store, run_id = made(tmp_path, repair=MEND)
    samples, repairs = manifests(store, run_id, "sample"), manifests(store, run_id, "repair")
    data = next(iter(manifests(store, run_id, "split").values()))
    pairs = store.read(data.artifact("pairs"))
    assert set(repairs) == {1, 2, 3}
    longer = redrawn = 0
    for iteration, repair in repairs.items():
        sampled = store.read(samples[iteration].artifact("completions"))
        status = frames.series(verdict.judge(sampled, pairs)["status"]).alias("status")
        rows = frames.frame(sampled).with_columns(status)
        before = rows.filter(pl.col("status").is_in(["truncated", "unparsed"]))
        after = frames.frame(store.read(repair.artifact("completions")))
        joined = before.join(after, on=JUDGMENT_ID, how="full", suffix="_after")
        assert joined.height == before.height == after.height > 0
        for row in joined.iter_rows(named=True):
            if row["status"] == "truncated":
                assert row["text_after"].startswith(row["text"])
                assert row["n_tokens_after"] > row["n_tokens"]
                longer += 1
            elif row["text_after"] != row["text"]:
                assert verdict.read(row["text_after"]).outcome is not None
                redrawn += 1
        whole = frames.frame(generation.read_all(store, {"completions": samples[iteration], "repaired": repair}))
        assert whole.select(JUDGMENT_ID).is_duplicated().sum() == 0
        assert whole.height == rows.height
        untouched = rows.drop("status").join(before, on=JUDGMENT_ID, how="anti")
        assert whole.join(after, on=JUDGMENT_ID, how="anti").sort(JUDGMENT_ID).equals(untouched.sort(JUDGMENT_ID))
        counts = repair.counts
        assert counts["in"] == before.height == counts["kept"] + sum(counts["dropped"].values())
        select = manifests(store, run_id, "select")[iteration]
        assert select.counts["dropped"].get("unparsed", 0) == counts["dropped"].get("unparsed", 0)
        assert select.counts["dropped"].get("truncated", 0) == counts["dropped"].get("truncated", 0)
        assert select.inputs["repaired"] == repair.artifact("completions").digest
    assert longer > 3
    assert redrawn > 3


@pytest.mark.parametrize(("repair", "kind"), [({"tokens": 9}, "truncated"), ({"redraws": 1}, "unparsed")])
def test_only_what_is_asked_for_is_mended(tmp_path: Path, repair: dict[str, int], kind: str) -> None:
    store, run_id = made(tmp_path, repair=repair, iterations=1)
    sampled = store.read(manifests(store, run_id, "sample")[1].artifact("completions"))
    pairs = store.read(manifests(store, run_id, "split")[0].artifact("pairs"))
    statuses = frames.series(verdict.judge(sampled, pairs)["status"])
    assert manifests(store, run_id, "repair")[1].counts["in"] == (statuses == kind).sum() > 0


def test_a_run_that_mends_reuses_the_samples_and_evaluations_of_one_that_does_not(tmp_path: Path) -> None:
    store, plain = made(tmp_path)
    _, mending = made(tmp_path, repair=MEND)
    used = {(one.iteration, one.step, one.label): one for one in read_history(store, mending).used}
    of_checkpoint_0 = [one for place, one in used.items() if place[0] == 0] + [used[1, "sample", ""]]
    assert all(one.reused for one in of_checkpoint_0)
    assert not used[1, "repair", ""].reused
    assert not used[1, "select", ""].reused
    assert not list(read_history(store, plain).of("repair"))
    assert "repaired" not in manifests(store, plain, "select")[1].inputs


def test_the_answer_is_shown_for_what_is_wrong_after_mending(tmp_path: Path) -> None:
    store, run_id = made(
        tmp_path, repair=MEND, rationalize={"failures": True}, sample={"n": 1, "max_tokens": 64, "shard_pairs": 10}
    )
    for iteration, hinted in manifests(store, run_id, "rationalize").items():
        samples, repair = (manifests(store, run_id, step)[iteration] for step in ("sample", "repair"))
        pairs = store.read(manifests(store, run_id, "split")[0].artifact("pairs"))
        written = {"completions": samples, "repaired": repair}
        whole = frames.frame(verdict.judge(generation.read_all(store, written), pairs))
        right = set(whole.filter(pl.col("status") == "correct")["pair_id"])
        asked = set(store.read(hinted.artifact("completions"))["pair_id"].to_pylist())
        assert asked == set(whole["pair_id"]) - right
        select = manifests(store, run_id, "select")[iteration]
        assert {"completions", "repaired", "hinted"} <= select.inputs.keys()


def test_nothing_broken_is_committed_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Text("It is [[A]]", "stop", 3, -1.0)
    monkeypatch.setattr("tasks.engines.scripted._text", lambda digest, sample: whole)
    store, run_id = made(tmp_path, repair=MEND, iterations=1)
    repair = manifests(store, run_id, "repair")[1]
    assert repair.counts == {"in": 0, "kept": 0, "dropped": {}}
    assert repair.artifact("completions").rows == 0


class Strict(ScriptedEngine):
    """Keep the token budget as the real engines do."""

    asked: list[Request]

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.asked, self._max_len = [], max_len
        self._refused: list[Response] = []

    def add(self, request: Request) -> None:
        self.asked.append(request)
        mending = isinstance(request.tag, tuple) and isinstance(request.tag[-1], Begun)
        error = too_long(request, self._max_len) if mending else None
        if error:
            self._refused.append(Response(request.tag, error=error))
        else:
            super().add(request)

    def poll(self) -> list[Response]:
        refused, self._refused = self._refused, []
        return refused + super().poll()


def test_a_text_goes_on_within_the_token_budget_and_stays_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Strict] = []

    def start(context: Any, plan: Any, first: str) -> Any:
        engines.append(Strict(context.config.model.max_len))
        return engines[-1]

    monkeypatch.setattr("tasks.jobs.entry.start_engine", start)

    def mend(folder: Path, model: dict[str, int]) -> tuple[Store, str, list[Request]]:
        engines.clear()
        sample = {"n": 4, "max_tokens": 10, "shard_pairs": 10}
        store, run_id = made(folder, repair={"tokens": 500}, iterations=1, sample=sample, model=model)
        asked = [one for engine in engines for one in engine.asked if isinstance(one.tag, tuple)]
        return store, run_id, [one for one in asked if isinstance(one.tag[-1], Begun)]

    lengths = sorted(len(one.ids) for one in mend(tmp_path / "roomy", {})[2])
    longest = lengths[len(lengths) // 2]  # bytes: half of prompts and texts are longer
    store, run_id, going_on = mend(tmp_path / "tight", {"max_len": longest})
    repair = manifests(store, run_id, "repair")[1]
    rooms = {longest - len(one.ids) for one in going_on}
    assert min(rooms) < 1 < max(rooms), "some have room and some have none"
    for one in going_on:
        assert isinstance(one.sampling, Sampling)
        assert one.sampling.max_tokens == max(longest - len(one.ids), 1)
        assert bytes(one.ids).endswith(one.tag[-1].row["text"].encode())
    stored = store.read(repair.artifact("completions")).to_pylist()
    rows = {(row["pair_id"], row["order"], row["sample"]): row for row in stored}
    for one in going_on:
        row = one.tag[-1].row
        after = rows[row["pair_id"], row["order"], row["sample"]]
        assert (after == row) == (longest - len(one.ids) < 1)
    assert repair.counts["dropped"]["truncated"] >= sum(longest - len(one.ids) < 1 for one in going_on)


GOOD, BAD, CUT = (
    Text(" better. [[A]]", "stop", 5, -1.0),
    Text(" better.", "stop", 3, -0.5),
    Text(" better and", "length", 6, None),
)


@pytest.mark.parametrize(
    ("begun", "texts", "expected"),
    [
        ("Response A is", [GOOD], ("Response A is better. [[A]]", "stop", 13, -3.0)),
        ("Response A is", [CUT], ("Response A is better and", "length", 14, None)),
        ("Response A is", [], ("Response A is", "length", 8, -2.0)),
        ("", [BAD, GOOD], (" better. [[A]]", "stop", 5, -1.0)),
        ("", [BAD, CUT], ("Response A is", "length", 8, -2.0)),
        ("", [], ("Response A is", "length", 8, -2.0)),
    ],
)
def test_a_mended_row(begun: str, texts: list[Text], expected: tuple[Any, ...]) -> None:
    row = mended(Begun(ROW, begun, 1, 10), texts)
    assert (row["text"], row["finish_reason"], row["n_tokens"], row["logprob"]) == expected
    kept = ("pair_id", "checkpoint", "order", "sample", "hinted", "prob_a", "error")
    assert {name: row[name] for name in kept} == {name: ROW[name] for name in kept}


def test_half_a_character_at_the_cut_is_not_gone_on_from(tmp_path: Path) -> None:
    from tasks.models import Model
    from tasks.repair import repair_questions

    store, run_id = made(tmp_path, iterations=1)
    pairs = store.read(manifests(store, run_id, "split")[0].artifact("pairs")).slice(0, 1)
    sampled = store.read(manifests(store, run_id, "sample")[1].artifact("completions"))
    row = {**ROW, "pair_id": pairs["pair_id"][0].as_py(), "text": "caf\ufffd\ufffd"}
    rows = type(sampled).from_pylist([row], schema=sampled.schema)
    asked = repair_questions(small.config(tmp_path, repair=MEND), rows, pairs, Model("m", None))
    assert asked.begun is not None
    assert [one.text for one in asked.begun[row["pair_id"], "ab"]] == ["caf"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": Method.GENRM, "repair": {"tokens": 5}}, "repair.tokens: mends what `sample` wrote, and genrm has"),
        ({"method": Method.STAR_RATIONALIZER, "repair": {"redraws": 5}}, "repair.redraws: mends what `sample` wrote"),
        ({"sample": {"temperature": 0.0, "n": 1}, "repair": {"redraws": 1}}, "repair.redraws: at temperature 0 every"),
    ],
)
def test_what_can_not_be_mended_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert any(problem.startswith(said) for problem in check(small.config(tmp_path, **changes)))


@pytest.mark.parametrize("options", [(), ("--tokens", "-1"), ("--redraws", "65")])
def test_the_command_says_what_is_broken_and_what_it_refuses(tmp_path: Path, options: tuple[str, ...]) -> None:
    store, run_id = made(tmp_path)
    before = store.runs()
    found = broken_completions(store, run_id)
    assert found["truncated"] > 0
    assert found["unparsed"] > 0
    done = CliRunner().invoke(cli, ["repair", run_id, "--store", store.url, *options])
    if options:
        assert isinstance(done.exception, ConfigError)
        assert str(done.exception).startswith("repair.")
    else:
        assert done.exit_code == 2
        said = f"{run_id} has {found['truncated']} truncated, {found['unparsed']} unparsed; say what to mend"
        assert said in done.output
    assert store.runs() == before


def test_the_command_starts_a_run_of_the_same_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, run_id = made(tmp_path, name="judge")
    started: list[str] = []
    monkeypatch.setattr("configs.budget.fit", lambda described, machine: None)  # the scripted base has no layers
    monkeypatch.setattr("flows.cli._run_flow", lambda new, url, *, as_json: started.append(new))
    done = CliRunner().invoke(cli, ["repair", run_id, "--store", store.url, "--tokens", "40", "--redraws", "3"])
    assert done.exit_code == 0, done.output
    before, after = store.run_config(run_id), store.run_config(started[0])
    assert after.pop("repair") == MEND
    before.pop("repair")
    assert after == before
