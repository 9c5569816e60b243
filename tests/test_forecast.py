"""Forecast: assumed rates are ranges with a source, measured ones hold for the next run, and a plan is held to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import small

from configs.run import Method
from flows.iteration import star
from storage.manifest import Manifest
from tasks import rates
from tasks.earlier import Place
from tasks.estimate import ASSUMED, Range, total
from tasks.forecast import START, forecast
from tasks.outcome import compare_plan, cost_plan, freeze_plan
from tasks.plan import Planned
from tasks.rates import Measured
from tasks.sizes import Sizes, source_sizes, split_sizes
from tasks.step import software
from tasks.training.order import cut_batches

if TYPE_CHECKING:
    from pathlib import Path

    from storage.store import Store

pytestmark = pytest.mark.usefixtures("no_fsync")

HERE = {"host": software()["host"]}


def made(place: Place, rows: int, **facts: Any) -> Manifest:
    return Manifest("0" * 64, 0, place.step, 1, {}, {}, {}, {"in": rows, "kept": rows}, {**HERE, **facts}, "", "")


def generation(place: Place, *, prompts: int, draws: int, length: float, seconds: float) -> tuple[Place, Manifest]:
    written = prompts * draws
    facts = {"tokens": round(written * length), "prompts": prompts, "prompt_tokens": prompts * 100}
    facts |= {"completions": written, "seconds": seconds, "engine": {"start": "e", "start_seconds": 40.0}}
    return place, made(place, written, **facts)


def planned(place: Place, rows: int | None) -> Planned:
    return Planned(*place, "to do", "", rows)


SIZES = Sizes({"part-1": 100, "test": 50}, dict.fromkeys(("part-1", "test"), Range.exactly(100)), True, "the split")


def config(tmp_path: Path, **changes: Any) -> Any:
    """Describe a run of a real engine, which is never started here."""
    described = small.config(tmp_path, **{"engine": {"kind": "vllm"}, "sample": {"n": 2}, **changes})
    (tmp_path / "base" / "config.json").write_text(
        '{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}'
    )
    return described


def test_ranges_add_up_end_by_end() -> None:
    assert Range(10, 5, 20).times(Range(2, 1, 3)) == (20, 5, 60)
    assert Range(10, 5, 20).over(Range(2, 1, 4)) == (5, 1.25, 20)
    assert Range(10, 9, 11).widened(0.25) == (10, 7.5, 12.5)
    assert total([Range(1, 0, 2), None, Range.exactly(3)]) == (4, 3, 5)


def test_every_assumption_has_a_range_and_a_source() -> None:
    for name, one in ASSUMED.items():
        assert one.range.low <= one.range.value <= one.range.high, name
        assert one.source


def test_without_an_earlier_run_the_assumptions_are_named(tmp_path: Path) -> None:
    sample = Place(1, "sample", "")
    found = forecast(config(tmp_path), [planned(sample, 200)], SIZES, Measured())
    start, step = found.steps
    assert (start.place.step, start.place.iteration) == (START, 0)
    assert step.estimate.rows == Range.exactly(200)
    assert step.estimate.prompt_tokens == Range.exactly(100 * 100), "a prompt is read once for all its completions"
    assert step.estimate.tokens == Range.exactly(200 * 64).times(ASSUMED["length"].range)
    assert ASSUMED["length"].source in step.estimate.source
    assert step.estimate.seconds is not None
    assert step.estimate.seconds.low < step.estimate.seconds.value < step.estimate.seconds.high


def test_measured_lengths_and_rates_hold_for_the_next_run(tmp_path: Path) -> None:
    described = config(tmp_path)
    earlier = dict(
        [
            generation(Place(1, "sample", ""), prompts=50, draws=2, length=30, seconds=60.0),
            generation(Place(2, "sample", ""), prompts=50, draws=2, length=40, seconds=80.0),
            generation(Place(0, "evaluate", "test ab votes 1–2"), prompts=25, draws=2, length=20, seconds=10.0),
        ]
    )
    measured = Measured.of(described, "run-1", described, earlier)
    places = [Place(1, "sample", ""), Place(2, "sample", ""), Place(3, "sample", "")]
    found = forecast(described, [planned(place, 200) for place in places], SIZES, measured)
    starts = [one for one in found.steps if one.place.step == START]
    assert [one.place.iteration for one in starts] == [0, 1, 2]
    assert starts[0].estimate.seconds == Range(40, 30, 50)
    tokens = [one.estimate.tokens for one in found.steps if one.place.step == "sample"]
    assert [one and one.value for one in tokens] == [200 * 30, 200 * 40, 200 * 35], (
        "the same place first, else the mean"
    )
    assert tokens[0] is not None
    assert (tokens[0].low, tokens[0].high) == (200 * 27, 200 * 40)
    sampled = found.steps[1].estimate
    assert sampled.source == "measured in run-1"
    assert sampled.seconds is not None
    assert sampled.seconds.value == pytest.approx(120.0), "twice the prompts, the same length and rate"


def test_a_rate_of_another_engine_or_model_is_none(tmp_path: Path) -> None:
    described = config(tmp_path)
    earlier = dict([generation(Place(1, "sample", ""), prompts=50, draws=2, length=30, seconds=60.0)])
    other = described.model_copy(update={"engine": described.engine.model_copy(update={"dtype": "float32"})})
    assert Measured.of(described, "run", other, earlier).manifests == {}
    assert Measured.of(described, "run", described, earlier).manifests == earlier


def test_a_rate_of_another_machine_has_more_room(tmp_path: Path) -> None:
    place, manifest = generation(Place(1, "sample", ""), prompts=50, draws=2, length=30, seconds=60.0)
    foreign = made(place, 100, **{**manifest.facts, "host": {"machine": "other", "gpus": []}})
    there = Measured("run", {place: foreign}).mean(place, rates.work_rate(0.1), room=0.25)
    here = Measured("run", {place: manifest}).mean(place, rates.work_rate(0.1), room=0.25)
    assert there is not None
    assert here is not None
    assert there.value == here.value
    assert there.low < here.low


def test_a_training_is_known_by_its_tokens(tmp_path: Path) -> None:
    described = config(tmp_path, train={"kind": "trl", "epochs": 2})
    facts = {"train_seconds": 50.0, "tokens_per_second": 200.0, "rows_seen": 100, "seconds": 70.0, "resumed_at": 0}
    place = Place(1, "train", "")
    asked = {"yields": {"asked": 100}, "fresh": 50}
    earlier = {place: made(place, 50, **facts), Place(1, "pairs", ""): made(Place(1, "pairs", ""), 60, **asked)}
    measured = Measured.of(described, "run-1", described, earlier)
    steps = [planned(Place(1, "pairs", ""), None), planned(place, None)]
    pairs, train = (one.estimate for one in forecast(described, steps, SIZES, measured).steps)
    assert pairs.rows is not None
    assert pairs.rows.value == 50, "half of the hundred prompts give a row"
    assert train.tokens is not None
    assert train.tokens.value == 50 * 2 * 100, "rows × epochs × tokens of a row"
    assert train.seconds is not None
    assert train.seconds.value == pytest.approx(50 + 20)


def test_suites_are_summed_apart(tmp_path: Path) -> None:
    labels = [f"{suite} {order} votes 1–2" for suite in ("test", "base test") for order in ("ab", "ba")]
    steps = [planned(Place(number, "evaluate", label), 100) for number in range(2) for label in labels]
    found = forecast(config(tmp_path), steps, SIZES, Measured())
    assert set(found.suites()) == {"test"}
    assert found.suites()["test"]["rows"] == Range.exactly(800)
    assert found.totals()["rows"] == Range.exactly(800)
    assert found.engine_starts() == 2


# ---- whole runs of the scripted engine


def test_sizes_are_those_of_the_split_or_estimated_from_the_sources(tmp_path: Path) -> None:
    described = small.config(tmp_path)
    store, run = small.start(described)
    split = run.split(run.base())
    exact, expected = split_sizes(store, described, split), source_sizes(described, store.cache.root)
    assert exact.exact
    assert not expected.exact
    assert exact.pairs.keys() == expected.pairs.keys()
    assert sum(expected.pairs.values()) == pytest.approx(sum(exact.pairs.values()), rel=0.15)
    for name, tokens in exact.prompt_tokens.items():
        assert expected.prompt_tokens[name].value == pytest.approx(tokens.value, rel=0.15), name
    facts = {name: value for name, value in split.facts.items() if name != "prompt_tokens"}
    older = Manifest(**{**{name: getattr(split, name) for name in Manifest.__dataclass_fields__}, "facts": facts})
    measured = split_sizes(store, described, older).prompt_tokens
    assert all(measured[name].value == pytest.approx(one.value, rel=0.15) for name, one in exact.prompt_tokens.items())


def test_an_unknown_data_set_of_the_hub_is_not_counted(tmp_path: Path) -> None:
    hub = {"name": "far", "hub": "who/what", "revision": "1" * 40}
    described = small.config(tmp_path, data={"sources": [hub], "suites": []}, bootstrap=None, split={"bootstrap": 0})
    store = small.start(described)[0]
    assert source_sizes(described, store.cache.root) == Sizes()
    steps, found = cost_plan(store, described, star)
    assert any(one.step == "sample" and one.rows is None for one in steps)
    assert "sample" in found.unknown()
    for name, test in (("train_prefs", 6114), ("test_prefs", None)):
        known = {**hub, "hub": "HuggingFaceH4/ultrafeedback_binarized", "split": name}
        changes = {"data": {"sources": [known], "suites": []}, "bootstrap": None, "split": {"bootstrap": 0}}
        sizes = source_sizes(small.config(tmp_path, **changes), store.cache.root)
        assert sizes.pairs.get("test") == test
        assert "card" in sizes.source or test is None


def test_gpus_that_work_together_are_faster_and_all_counted(tmp_path: Path) -> None:
    def training(**changes: Any) -> Any:
        described = config(tmp_path, hardware={"gpus": 4, "gpu_memory_gib": 80}, **changes)
        steps = [planned(Place(1, "pairs", ""), None), planned(Place(1, "train", ""), None)]
        values = described.model_dump(mode="json")
        values["train"]["kind"] = "trl"
        described = type(described).model_validate(values)
        found = forecast(described, steps, SIZES, Measured())
        return next(one.estimate for one in found.steps if one.place.step == "train")

    start = ASSUMED["trainer start"].range.value
    one, four = training(), training(train={"processes": 4, "batch_size": 32})
    assert (one.gpus, four.gpus) == (1, 4)
    assert four.seconds.value - start == pytest.approx((one.seconds.value - start) / 4, rel=0.01)


def test_plain_transformers_are_planned_slower_than_vllm(tmp_path: Path) -> None:
    steps = [planned(Place(1, "sample", ""), 100)]
    fast, slow = (
        forecast(config(tmp_path, engine={"kind": kind}), steps, SIZES, Measured()).steps[-1].estimate
        for kind in ("vllm", "transformers")
    )
    assert slow.seconds.value > 3 * fast.seconds.value


def test_a_damaged_step_of_an_earlier_run_stops_no_new_run(tmp_path: Path) -> None:
    store, _ = finish(small.config(tmp_path, iterations=1))
    for path in (tmp_path / "store" / "steps").glob("*/0/manifest.json"):
        if json.loads(path.read_text())["step"] == "gate":
            path.write_bytes(path.read_bytes().replace(b"gate", b"gaol", 1))
    _, second = finish(small.config(tmp_path, iterations=1, seed=5))
    assert compare_plan(store, second)


def finish(described: Any) -> tuple[Store, str]:
    store, run = small.start(described)
    freeze_plan(store, run.run_id, described, star)
    star(run)
    return store, run.run_id


@pytest.mark.parametrize("method", ["star-sft", "star-dpo"])
def test_after_one_run_the_next_ones_tokens_are_known(tmp_path: Path, method: str) -> None:
    base = {"data": {"suites": small.SECTIONS["data"]["suites"]}, "method": method, "iterations": 2}
    store, first = finish(small.config(tmp_path, **base))
    assert next(one for one in compare_plan(store, first) if one.step == "sample").tokens_planned is not None
    store, second = finish(small.config(tmp_path, **base, seed=1, sample={"n": 8}))
    outcomes = {(one.iteration, one.step, one.label): one for one in compare_plan(store, second)}
    whole = outcomes[0, "in all", ""]
    assert whole.tokens_ratio == pytest.approx(1, abs=0.15)
    assert whole.seconds is not None
    assert whole.seconds_planned is not None
    sampled = outcomes[1, "sample", ""]
    assert sampled.tokens_ratio == pytest.approx(1, abs=0.15)
    assert {place[1] for place in outcomes} >= {START, "evaluate", "score", "split", "select", "pairs", "train"}
    assert sum(place[1] == START for place in outcomes) == 3, "the untrained judge is served beside checkpoint 0"
    assert outcomes[0, "split", ""].tokens is None


def test_the_time_of_a_session_is_shared_among_its_steps(tmp_path: Path) -> None:
    store, run_id = finish(small.config(tmp_path, iterations=1))
    outcomes = compare_plan(store, run_id)
    for one in outcomes:
        if one.step in ("evaluate", "sample"):
            assert one.seconds is not None
            assert 0 <= one.seconds < 60


def test_what_a_finished_run_plans_costs_nothing(tmp_path: Path) -> None:
    described = small.config(tmp_path, iterations=1)
    store, _ = finish(described)
    steps, found = cost_plan(store, described, star)
    assert {one.state for one in steps} == {"reused"}
    assert found.steps == ()
    assert found.to_json()["totals"]["engine_starts"] == 0


@pytest.mark.parametrize("method", ["genrm", "star-rationalizer"])
def test_every_method_is_planned(tmp_path: Path, method: str) -> None:
    described = small.config(tmp_path, method=method, iterations=1)
    store, run_id = finish(described)
    assert [one.step for one in compare_plan(store, run_id)][-1] == "in all"
    _, found = cost_plan(store, small.config(tmp_path, method=method, iterations=1, seed=3), star)
    assert found.unknown() == []


def test_failures_asked_again_are_planned(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rationalize": {"failures": True}, "iterations": 1, "sample": {"n": 1}}
    finish(small.config(tmp_path, **changes))
    store, second = finish(small.config(tmp_path, **changes, seed=1))
    again = next(one for one in compare_plan(store, second) if one.step == "rationalize")
    assert again.tokens is not None
    assert again.tokens_planned is not None
    assert 0.4 < again.tokens / again.tokens_planned < 2.5


@pytest.mark.parametrize(
    ("then", "method", "iteration", "expected"),
    [
        (Method.STAR_SFT, Method.STAR_SFT, 1, 500 / 4),  # measured
        (Method.STAR_SFT, Method.GENRM, 1, 100 + 6),  # a prompt and a verdict
        (Method.STAR_SFT, Method.STAR_DPO, 0, 500 / 4),  # a warm start is of one kind
        (Method.STAR_DPO, Method.STAR_SFT, 1, 100 + 0.3 * 64),  # a prompt and a completion
    ],
)
def test_rows_of_another_method_tell_no_length(
    tmp_path: Path, then: Method, method: Method, iteration: int, expected: float
) -> None:
    place = Place(iteration, "train", "")
    facts = {"tokens_per_second": 50.0, "train_seconds": 10.0, "rows_seen": 4, "seconds": 12.0}
    earlier = Measured("run", {place: made(place, 4, **facts)}, then)
    rows = planned(Place(iteration, "indicators" if method is Method.GENRM else "pairs", ""), None)
    described = config(tmp_path, method=method, train={"epochs": 1.0}, bootstrap={"rationales": "generator"})
    sizes = Sizes({**SIZES.pairs, "bootstrap": 100}, SIZES.prompt_tokens, True, "the split")
    steps = (
        [rows, planned(place, None)] if iteration else [planned(Place(0, "bootstrap", ""), 100), planned(place, None)]
    )
    found = forecast(described, steps, sizes, earlier).steps[-1].estimate
    assert found.tokens is not None
    assert found.rows is not None
    seen = cut_batches(described.train, round(found.rows.value)).total
    assert found.tokens.value == pytest.approx(seen * expected)


def test_mended_completions_are_planned_by_their_share(tmp_path: Path) -> None:
    sample, repair = Place(1, "sample", ""), Place(1, "repair", "")
    described = config(tmp_path, repair={"tokens": 8})
    assumed = forecast(described, [planned(sample, 200), planned(repair, None)], SIZES, Measured()).steps[-1]
    assert assumed.place == repair
    assert assumed.estimate.rows == Range.exactly(200).times(ASSUMED["broken"].range)
    earlier = dict([generation(sample, prompts=100, draws=2, length=20, seconds=10)])
    earlier[repair] = made(repair, 30, tokens=300, prompts=30, prompt_tokens=3000, completions=30, seconds=3.0)
    measured = forecast(described, [planned(repair, None)], SIZES, Measured("run", earlier)).steps[-1].estimate
    assert measured.rows is not None
    assert measured.tokens is not None
    assert measured.rows.value == pytest.approx(30)
    assert measured.tokens.value == pytest.approx(300)


def test_a_plan_is_measured_by_the_run_that_is_most_like(tmp_path: Path) -> None:
    """The latest run may have written no text at all, or trained on other rows."""
    runs = [
        ("plain", Method.STAR_SFT),
        ("sided", Method.STAR_DPO),
        ("letters", Method.GENRM),
    ]
    for name, method in runs:
        store, run = small.start(small.config(tmp_path, name=name, method=method, iterations=1))
        star(run)
    for method, source in [*((method, name) for name, method in runs), (Method.STAR_RATIONALIZER, "sided")]:
        described = small.config(tmp_path, name="next", method=method, iterations=1, seed=5)
        sources = {one.estimate.source for one in cost_plan(store, described, star)[1].steps}
        named = {said.split("measured in ")[1].rsplit("-", 2)[0] for said in sources if "measured in " in said}
        assert named == {source}


def test_another_dtype_tells_lengths_and_no_rate(tmp_path: Path) -> None:
    sample = Place(1, "sample", "")
    manifests = dict([generation(sample, prompts=100, draws=2, length=20, seconds=10)])
    now, then = config(tmp_path), config(tmp_path, engine={"kind": "vllm", "dtype": "float32"})
    other = config(tmp_path, engine={"kind": "transformers"})

    def planned_by(earlier: Any) -> Any:
        known = Measured.of(now, "run", earlier, manifests)
        return forecast(now, [planned(sample, 200)], SIZES, known).steps[-1].estimate

    same, dtype, kind = (planned_by(one) for one in (now, then, other))
    assert same.tokens.value == dtype.tokens.value == 200 * 20
    assert kind.tokens.value == pytest.approx(200 * 0.3 * 64)
    assert same.source == "measured in run"
    assert dtype.source.startswith("rate: ")
    assert kind.source.startswith("length: ")


def test_what_an_earlier_run_dropped_as_broken_is_what_is_mended(tmp_path: Path) -> None:
    described = config(tmp_path, repair={"tokens": 8})
    place = Place(1, "select", "")
    counts = {"in": 200, "kept": 20, "dropped": {"truncated": 80, "unparsed": 60, "wrong": 40}}
    earlier = {place: replace(made(place, 200), counts=counts)}
    steps = [planned(Place(1, "repair", ""), None)]
    rows = forecast(described, steps, SIZES, Measured("run", earlier)).steps[-1].estimate.rows
    assert rows is not None
    assert rows.value == pytest.approx(80)
