"""Completions of one step: shards commit on the way, bad prompts become rows, dead engines commit nothing half."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import small
from hypothesis import given
from hypothesis import strategies as st

from flows.iteration import star
from storage.errors import TransientError
from storage.store import open_store
from tasks.data import formats, synthetic
from tasks.engines.base import Response, Sampling, Text, prob_a
from tasks.engines.scripted import ScriptedEngine
from tasks.generation import Generation, Questions, forced_choice_prefix
from tasks.judge import verdict
from tasks.step import Context, Step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from storage.manifest import Manifest
    from tasks.engines import base
    from tasks.engines.base import Request

pytestmark = pytest.mark.usefixtures("no_fsync")

STEP = Step("sample", 1, {"pairs": "some", "model": "m"}, {})
PAIRS, SHARD, DRAWS = 11, 4, 3


class Engine(ScriptedEngine):
    """Count what is asked; refuse the prompts of some pairs; die after some answers."""

    def __init__(self, *, refused: tuple[str, ...] = (), answers: int | None = None) -> None:
        super().__init__()
        self.asked: list[Request] = []
        self._refused, self._left = refused, answers

    def add(self, request: Request) -> None:
        self.asked.append(request)
        super().add(request)

    def poll(self) -> list[Response]:
        if self._left == 0:
            raise TransientError("the engine died")
        found = super().poll()
        if self._left is not None:
            self._left -= len(found)
        if not self._refused:
            return found
        refusal = "prompt of 9 tokens is over 8"
        return [Response(one.tag, error=refusal) if one.tag[2] in self._refused else one for one in found]

    @property
    def pairs(self) -> set[str]:
        """The pairs whose completions were asked for."""
        return {one.tag[2] for one in self.asked if one.sampling}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    store = open_store(str(tmp_path / "store"))
    return Context(store, small.config(tmp_path), tmp_path / "work")


def questions(*, forced_choice: bool = False, first_sample: int = 0) -> Questions:
    made = formats.read_pairs(synthetic.generate(("capitals",), PAIRS, seed=0), name="made").pairs.sort_by("pair_id")
    return Questions(
        pairs=made,
        orders={one: ["ab", "ba"] for one in made["pair_id"].to_pylist()},
        sampling=Sampling(DRAWS, 1.0, 1.0, 64),
        model="m" * 64,
        forced_choice=forced_choice,
        shard_pairs=SHARD,
        first_sample=first_sample,
    )


def answer(
    context: Context, asked: Questions, engine: Engine, after: Callable[[Generation], None] = lambda _: None
) -> Manifest:
    """Do what a session does, one request at a time; `after` is called behind each answer, with nothing being saved."""
    generation = Generation(context, STEP, asked, cast("base.Engine", engine), iteration=1)
    while not generation.answered:
        request = generation.next_request()
        if request is not None:
            engine.add(request)
        with ThreadPoolExecutor(2) as pool:
            for response in engine.poll():
                for follow in generation.accept(response, pool):
                    engine.add(follow)
        after(generation)
    return generation.commit({})


def shards(context: Context) -> set[int]:
    attempt = context.store.attempt(STEP.key)
    ids = questions().pairs["pair_id"].to_pylist()
    return set(attempt.shards(attempt.plan(ids, SHARD)))


def test_shards_are_committed_while_later_requests_run(context: Context) -> None:
    engine, seen = Engine(), []

    def look(generation: Generation) -> None:
        seen.append((len(engine.asked), shards(context)))
        assert generation.done_pairs == sum(min(SHARD, PAIRS - one * SHARD) for one in seen[-1][1])
        assert context.store.manifest(STEP.key) is None

    manifest = answer(context, questions(), engine, look)
    assert seen == [(n, {one for one in range(3) if n >= min(2 * SHARD * (one + 1), 2 * PAIRS)}) for n in range(1, 23)]
    assert context.store.manifest(STEP.key) == manifest
    assert [file.rows for file in manifest.artifact("completions").files] == [24, 24, 18]


@pytest.mark.parametrize("forced_choice", [False, True])
def test_rows_of_a_step(context: Context, forced_choice: bool) -> None:
    asked = questions(forced_choice=forced_choice, first_sample=8)
    manifest = answer(context, asked, Engine())
    rows = context.store.read(manifest.artifact("completions")).to_pylist()
    ids = asked.pairs["pair_id"].to_pylist()
    expected = [(one, order, 8 + draw) for one in ids for order in ("ab", "ba") for draw in range(DRAWS)]
    assert [(row["pair_id"], row["order"], row["sample"]) for row in rows] == expected
    assert {(row["checkpoint"], row["hinted"], row["error"]) for row in rows} == {("m" * 64, False, None)}
    assert all((row["prob_a"] is not None) == forced_choice for row in rows)
    assert len({row["prob_a"] for row in rows}) > (len(rows) / 4 if forced_choice else 0)
    assert manifest.counts == {"in": len(rows), "kept": len(rows), "dropped": {}}


def test_the_forced_choice_follows_the_own_rationale_of_each_completion(context: Context) -> None:
    engine = Engine()
    rows = context.store.read(
        answer(context, questions(forced_choice=True), engine).artifact("completions")
    ).to_pylist()
    prompts = {(one.tag[2], one.tag[3]): bytes(one.ids) for one in engine.asked if one.sampling}
    followed = Counter(bytes(one.ids) for one in engine.asked if not one.sampling)
    assert followed == Counter(
        prompts[row["pair_id"], row["order"]] + forced_choice_prefix(row["text"]).encode() for row in rows
    )


class OwnLetters(Engine):
    """Give the letters' log-probs where a completion draws its verdict, as vLLM does, and at another letter."""

    def poll(self) -> list[Response]:
        return [replace(one, texts=tuple(self._read(text) for text in one.texts)) for one in super().poll()]

    def _read(self, text: Text) -> Text:
        spoken, bracket, verdict = text.text.partition("[[")
        return replace(text, letters={"Response ": (-9.0, -0.1), **({spoken + bracket: OWN} if verdict else {})})


OWN = (-0.5, -1.5)


def test_the_forced_choice_is_read_off_the_own_verdict_and_asked_for_where_there_is_none(context: Context) -> None:
    engine = OwnLetters()
    manifest = answer(context, questions(forced_choice=True), engine)
    rows = context.store.read(manifest.artifact("completions")).to_pylist()
    spoken = [row for row in rows if "[[" in row["text"]]
    silent = [row for row in rows if "[[" not in row["text"]]
    assert len(spoken) > 40
    assert silent
    assert {row["prob_a"] for row in spoken} == {prob_a(OWN)}
    assert prob_a(OWN) not in {row["prob_a"] for row in silent}
    assert sum(not one.sampling for one in engine.asked) == len(silent)


def test_orders_show_the_responses_swapped(context: Context) -> None:
    engine, asked = Engine(), questions()
    answer(context, asked, engine)
    row = asked.pairs.slice(0, 1).to_pylist()[0]
    shown = {one.tag[3]: bytes(one.ids).decode() for one in engine.asked if one.tag[2] == row["pair_id"]}
    assert f"A: {row['response_a']}\nB: {row['response_b']}" in shown["ab"]
    assert f"A: {row['response_b']}\nB: {row['response_a']}" in shown["ba"]


@pytest.mark.parametrize("forced_choice", [False, True])
def test_a_prompt_that_can_never_succeed_becomes_rows_with_a_reason(context: Context, forced_choice: bool) -> None:
    asked = questions(forced_choice=forced_choice)
    refused = asked.pairs["pair_id"].to_pylist()[5]
    manifest = answer(context, asked, Engine(refused=(refused,)))
    completions = context.store.read(manifest.artifact("completions"))
    bad = [row for row in completions.to_pylist() if row["error"]]
    assert [(row["pair_id"], row["order"], row["sample"]) for row in bad] == [
        (refused, order, draw) for order in ("ab", "ba") for draw in range(DRAWS)
    ]
    assert {(row["error"], row["finish_reason"], row["text"], row["prob_a"]) for row in bad} == {
        ("prompt of 9 tokens is over 8", "error", "", None)
    }
    assert manifest.counts == {"in": 66, "kept": 60, "dropped": {"error": 6}}
    statuses = Counter(verdict.judge(completions, asked.pairs)["status"].to_pylist())
    assert statuses["error"] == 6


def test_a_dead_engine_commits_nothing_of_the_shard_it_died_in(context: Context) -> None:
    with pytest.raises(TransientError, match="died"):
        answer(context, questions(), Engine(answers=13))
    assert shards(context) == {0}
    assert context.store.manifest(STEP.key) is None
    payload = [key for key in context.store.backend.list(f"steps/{STEP.key}/") if key.endswith(".parquet")]
    assert len(payload) == 1


@pytest.mark.parametrize("answers", [0, 7, 8, 13, 16, 21])
def test_the_resumed_step_asks_only_for_the_missing_shards(context: Context, tmp_path: Path, answers: int) -> None:
    other = Context(open_store(str(tmp_path / "undisturbed")), context.config, context.work)
    undisturbed = answer(other, questions(), Engine())
    with pytest.raises(TransientError):
        answer(context, questions(), Engine(answers=answers))
    engine, done = Engine(), answers // (2 * SHARD)
    manifest = answer(context, questions(), engine)
    assert engine.pairs == set(questions().pairs["pair_id"].to_pylist()[done * SHARD :])
    assert manifest.facts["reused_shards"] == done
    assert manifest.artifact("completions").digest == undisturbed.artifact("completions").digest


def test_another_shard_size_keeps_the_plan_in_force(context: Context) -> None:
    with pytest.raises(TransientError):
        answer(context, questions(), Engine(answers=10))
    asked = questions()
    engine = Engine()
    manifest = answer(context, Questions(**{**vars(asked), "shard_pairs": 2}), engine)
    assert len(manifest.artifact("completions").files) == 3
    assert len(engine.asked) == 2 * (PAIRS - SHARD)


def test_a_dead_engine_ends_the_run_and_the_resumed_run_asks_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 8: one dead engine doesn't cost what was committed; a shard in flight is never committed."""
    described = small.config(tmp_path, iterations=1, bootstrap=None, data={"suites": []}, sample={"shard_pairs": 5})
    dying, whole = Engine(answers=150), Engine()
    monkeypatch.setattr("tasks.jobs.entry.start_engine", lambda *_: dying)
    store, run = small.start(described)
    with pytest.raises(TransientError, match="died"):
        star(run)
    committed = {key: store.backend.get(key) for key in store.backend.list("steps/") if "/shards/" in key}
    assert committed

    monkeypatch.setattr("tasks.jobs.entry.start_engine", lambda *_: whole)
    assert star(small.start(described, run_id=run.run_id)[1]).number == 1
    assert {key: store.backend.get(key) for key in committed} == committed
    again = {f"steps/{one.tag[0]}/0/shards/{one.tag[1]:05d}.json" for one in whole.asked if one.sampling}
    assert again
    assert not again & set(committed)


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ("B is shorter. [[B]]", "B is shorter. [["),
        ("B is shorter.[[B]] And so on", "B is shorter.[["),
        ("First [[A]].\nNo, rather [[ B ]]", "First [[A]].\nNo, rather [["),
        ("It is [[A]] or [[B]].", "It is [["),
        ("Neither. [[C]]", "Neither. [["),
        ("I can't say", "I can't say [["),
        ("I can't say \n", "I can't say [["),
        ("Response A is in [A] brackets", "Response A is in [A] brackets [["),
        ("Cut off here [[", "Cut off here [[ [["),
        ("", " [["),
    ],
)
def test_forced_choice_prefix(text: str, prefix: str) -> None:
    assert forced_choice_prefix(text) == prefix


@given(st.text(alphabet="AB[] \nx", max_size=30))
def test_the_prefix_never_holds_the_verdict_that_counted(text: str) -> None:
    prefix = forced_choice_prefix(text)
    assert prefix.endswith("[[")
    read = verdict.read(text)
    if read.outcome in ("A", "B"):
        assert verdict.read(f"{prefix}{read.outcome}]]").outcome == read.outcome
        assert len(prefix) < len(text)


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        ((-1.0, -1.0), 0.5),
        ((math.log(0.3), math.log(0.1)), 0.75),
        ((0.0, -1e6), 1.0),
        ((-1e6, 0.0), 0.0),
        ((0.0, -math.inf), 1.0),
        ((-math.inf, 0.0), 0.0),
        ((-1e308, -1e308), 0.5),
    ],
)
def test_prob_a(logprobs: tuple[float, float], expected: float) -> None:
    assert prob_a(logprobs) == pytest.approx(expected, abs=1e-12)
    assert prob_a(logprobs[::-1]) == pytest.approx(1 - expected, abs=1e-12)


@given(st.floats(max_value=0, allow_nan=False), st.floats(max_value=0, allow_nan=False, allow_infinity=False))
def test_prob_a_is_a_probability_that_favours_the_likelier_letter(a: float, b: float) -> None:
    found: Any = prob_a((a, b))
    assert 0 <= found <= 1
    if a < b:
        assert found <= 0.5
    if a > b:
        assert found >= 0.5
