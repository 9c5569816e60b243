"""The judge without reasons: trained on the pairs' verdicts alone, read by its letters, never by a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow.compute as pc
import pytest
import small
from finished import Finished, finish
from judge_cases import PROMPT, SHOT, check_golden, fixed_case, pair, table

from flows.iteration import star
from storage.errors import DataError
from storage.schema import SCHEMAS
from tasks import indicators, score
from tasks.engines.scripted import ScriptedEngine, ScriptedTemplate
from tasks.judge import prompts
from tasks.plan import make_plan
from tasks.report import make_report, plot, results_table

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from tasks.engines.base import Request

pytestmark = pytest.mark.usefixtures("no_fsync")

GENRM: dict[str, Any] = {
    "method": "genrm",
    "data": {
        "sources": [{"name": "made", "generator": {"categories": ["capitals"], "count": 60}}],
        "suites": [{"name": "ood", "generator": {"categories": ["quotes"], "count": 6}}],
    },
    "split": {"bootstrap": 6},
    "sample": {"order": "both"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("genrm")


@pytest.fixture(scope="module")
def done(folder: Path) -> Finished:
    return finish(folder, **GENRM)


def test_the_loop_ends_at_the_last_checkpoint_and_writes_no_text(done: Finished) -> None:
    assert done.judge.number == 3
    steps = {one["step"] for one in done.events}
    assert steps == {"base", "split", "indicators", "train", "parity", "evaluate", "score", "gate"}
    order = [(one["iteration"], one["step"]) for one in done.events if one["step"] not in ("evaluate", "score")]
    expected = [(0, "base"), (0, "split"), (0, "indicators"), (0, "train")]
    for number in range(1, 4):
        expected += [(number - 1, "parity"), (number - 1, "gate"), (number, "indicators"), (number, "train")]
    assert order == [*expected, (3, "parity"), (3, "gate")]


def test_each_iteration_trains_on_the_verdicts_of_its_own_part(done: Finished) -> None:
    gold = {row["pair_id"]: row["gold"] for row in done.rows(0, "split", "pairs").to_dicts()}
    for number in range(4):
        rows = done.rows(number, "indicators", "sft").to_dicts()
        part = done.sets[f"part-{number}" if number else "bootstrap"]
        assert sorted((row["pair_id"], row["order"]) for row in rows) == sorted(
            (one, order) for one in part for order in ("ab", "ba")
        )
        for row in rows:
            shown = gold[row["pair_id"]] if row["order"] == "ab" else "BA"["AB".index(gold[row["pair_id"]])]
            assert row["completion"] == [{"role": "assistant", "content": f"[[{shown}]]"}]
        manifest = done.manifests[number, "indicators", ""]
        assert manifest.counts == {"in": len(rows), "kept": len(rows), "dropped": {}}
        assert done.manifests[number, "train", ""].counts["in"] == len(rows)


def test_every_pair_is_read_once_an_order(done: Finished) -> None:
    for number in range(4):
        for suite in ("dev", "test", "ood"):
            for order in ("ab", "ba"):
                manifest = done.manifests[number, "evaluate", f"{suite} {order} letters"]
                rows = pl.DataFrame(done.store.read(manifest.artifact("choices")))
                assert sorted(rows["pair_id"]) == sorted(done.sets[suite])
                assert set(rows["order"]) == {order}
                assert rows["prob_a"].is_between(0, 1).all()
                assert rows["error"].null_count() == rows.height


def test_a_session_starts_one_engine(done: Finished) -> None:
    starts: dict[int, set[str]] = {}
    for (iteration, step, _), manifest in done.manifests.items():
        if step in ("parity", "evaluate"):
            starts.setdefault(iteration, set()).add(manifest.facts["engine"]["start"])
    assert [len(starts[one]) for one in range(4)] == [1, 1, 1, 1]


def test_metrics_of_a_text_are_absent(done: Finished) -> None:
    for (_, step, label), manifest in done.manifests.items():
        if step == "score":
            assert set(manifest.artifacts) == {"metrics", "pair_scores"}, label
            metrics = pl.DataFrame(done.store.read(manifest.artifact("metrics")))
            assert set(metrics["metric"]) == set(score.LETTERS)
            pairs = pl.DataFrame(done.store.read(manifest.artifact("pair_scores")))
            assert pairs["free_text"].null_count() == pairs["consistent"].null_count() == pairs.height
            assert pairs["forced_choice"].is_in([0.0, 0.5, 1.0]).all()
    report = make_report(done.store, done.run.run_id)
    assert {tuple(one.metrics) for one in report.scores} == {("forced_choice", "pick_a_forced")}
    assert report.yields == []
    assert report.engine_starts == 4
    assert {tuple(row) for row in results_table(report)} == {("judge", "suite", "n", "forced_choice", "pick_a_forced")}
    assert {one.metric for one in report.compared} == {"forced_choice"}
    assert plot(report).startswith(b"\x89PNG")
    assert done.manifests[1, "gate", ""].facts["reason"].startswith("No evidence that it is worse")


def test_a_second_run_reuses_all_and_what_genrm_has_no_use_for_is_in_no_key(done: Finished, folder: Path) -> None:
    changes = {
        **GENRM,
        "sample": {"order": "both", "n": 9, "temperature": 0.3},
        "evaluate": {"votes": 5, "dev_votes": 3, "temperature": 0.5},
    }
    assert all(one["reused"] for one in finish(folder, **changes).events)
    assert {one.state for one in make_plan(done.store, small.config(folder, **GENRM), star)} == {"reused"}
    orders = finish(folder, **{**GENRM, "sample": {"order": "hash"}, "iterations": 1})
    assert orders.manifests[1, "indicators", ""].counts["in"] == len(orders.sets["part-1"])


def test_one_iteration_trains_on_all_pairs_once(tmp_path: Path) -> None:
    changes = {**GENRM, "iterations": 1, "bootstrap": None, "split": {"bootstrap": 0, "dev": 0.0}}
    planned = make_plan(small.start(small.config(tmp_path, **changes))[0], small.config(tmp_path, **changes), star)
    assert [one.step for one in planned if one.iteration == 1][:2] == ["indicators", "train"]
    done = finish(tmp_path, **changes)
    assert set(done.rows(1, "indicators", "sft")["pair_id"]) == done.sets["part-1"]
    assert done.sets["part-1"] | done.sets["test"] | done.sets["ood"] == set(done.rows(0, "split", "pairs")["pair_id"])


def test_earlier_rows_are_trained_on_again_where_the_config_says_so(tmp_path: Path) -> None:
    done = finish(tmp_path, **{**GENRM, "iterations": 2, "pairs": {"data": "cumulative"}})
    parts = [done.sets["bootstrap"], done.sets["part-1"], done.sets["part-2"]]
    for number in range(3):
        rows = done.rows(number, "indicators", "sft")
        assert set(rows["pair_id"]) == set().union(*parts[: number + 1])
        assert set(rows["checkpoint"]) == {indicators.GOLD}


class Asked(ScriptedEngine):
    """Keep what is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    def add(self, request: Request) -> None:
        self.asked.append(request)
        super().add(request)


def test_the_letters_are_read_right_behind_the_opening_of_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Asked()
    monkeypatch.setattr("tasks.jobs.entry.start_engine", lambda *_: engine)
    shot = SHOT.model_dump()
    finish(tmp_path, **{**GENRM, "iterations": 1, "bootstrap": None, "prompt": {"few_shot": [shot]}})
    read = [bytes(one.ids).decode() for one in engine.asked if not one.scored]
    assert read
    assert not [one for one in engine.asked if one.sampling]
    assert all(one.endswith("\n[[") for one in read)
    assert all("assistant: [[A]]\n" in one and shot["rationale"] not in one for one in read)


class Refusing(ScriptedTemplate):
    """Have no token for a letter."""

    def letters(self, opening: str = "x [[", closing: str = "") -> tuple[int, int]:
        raise DataError(f"no token between {opening} and {closing}")


def test_a_tokenizer_without_the_letters_is_refused_before_a_model_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.jobs.entry.load_template", lambda *_: Refusing())
    store, run = small.start(small.config(tmp_path, **GENRM))
    with pytest.raises(DataError, match=r"no token between \[\[ and \]\]"):
        star(run)
    assert [one["step"] for one in store.run_log(run.run_id).records() if one["kind"] == "step"] == ["base"]


def test_letters_of_a_real_tokenizer(tmp_path: Path) -> None:
    from tiny_model import TEMPLATE
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from tasks.engines.template import ChatTemplate

    vocabulary = {word: number for number, word in enumerate(("[[", "A", "B", "]]", "A]]", "[UNK]"))}
    for name, words in (("whole", ("[[", "A", "B", "]]")), ("merged", ("[[", "A", "B", "]]", "A]]"))):
        found = {word: vocabulary[word] for word in (*words, "[UNK]")}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordPiece(found, unk_token="[UNK]", continuing_subword_prefix="")),
            unk_token="[UNK]",
        )
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(tmp_path / name)
    whole = ChatTemplate(tmp_path / "whole", {})
    assert whole.letters("[[", "]]") == (vocabulary["A"], vocabulary["B"])
    with pytest.raises(DataError, match=r"`A` in `\[\[A\]\]` is not one token"):
        ChatTemplate(tmp_path / "merged", {}).letters("[[", "]]")


def choices(rows: list[tuple[str, str, float | None]]) -> pa.Table:
    names = ("pair_id", "order", "prob_a")
    made = [{"checkpoint": "c", "error": None, **dict(zip(names, row, strict=True))} for row in rows]
    return table("choices", made)


def test_choices_are_scored_by_hand() -> None:
    pairs = table("pairs", [pair("p", "A"), pair("q", "B")])
    rows = [("p", "ab", 0.9), ("p", "ba", 0.4), ("q", "ab", 0.8), ("q", "ba", 0.7)]
    metrics, scores = score.score_choices(choices(rows), pairs, suite="s")
    assert (metrics.schema, scores.schema) == (SCHEMAS["metrics"], SCHEMAS["pair_scores"])
    found = {row["metric"]: (row["value"], row["n"]) for row in metrics.to_pylist() if row["subset"] == ""}
    # gold has 0.9 and 0.6 of p, 0.2 and 0.7 of q: p is right twice, q once; on average q is below one half
    assert found == {
        "forced_choice": (pytest.approx(0.75), 2),
        "soft_vote": (pytest.approx(0.5), 2),
        "pick_a_forced": (pytest.approx(0.75), 4),
        "prob_gold": (pytest.approx(0.6), 4),
    }
    assert [row["forced_choice"] for row in scores.to_pylist()] == [1.0, 0.5]


def test_a_reading_that_failed_counts_nowhere() -> None:
    pairs = table("pairs", [pair("p", "A"), pair("q", "B")])
    rows = choices([("p", "ab", 0.9), ("p", "ba", None), ("q", "ab", None), ("q", "ba", None)])
    metrics, scores = score.score_choices(rows, pairs, suite="s")
    found = {row["metric"]: row["n"] for row in metrics.to_pylist() if row["subset"] == ""}
    assert found == {"forced_choice": 1, "soft_vote": 1, "pick_a_forced": 1, "prob_gold": 1}
    assert [row["forced_choice"] for row in scores.to_pylist()] == [1.0, None]


def test_golden() -> None:
    pairs, completions = fixed_case()
    rows = indicators.indicator_rows(pairs, {"p01": ["ab", "ba"], "p00": ["ba"]}, PROMPT)
    assert rows.schema == SCHEMAS["sft"]
    check_golden("indicators", indicators.VERSION, rows.to_pylist())
    read = completions.filter(pc.equal(completions["sample"], 0))
    made = score.score_choices(read.select(SCHEMAS["choices"].names), pairs, suite="s")
    check_golden("score_choices", score.VERSION, [one.to_pylist() for one in made])


def test_few_shot_examples_are_answered_in_the_form_that_is_trained(tmp_path: Path) -> None:
    described = small.config(tmp_path, method="genrm", prompt={"few_shot": [SHOT.model_dump()]})
    messages = prompts.judge_messages(prompts.worded(described), "q", "x", "y")
    assert messages[2] == {"role": "assistant", "content": "[[A]]"}
    described = small.config(tmp_path, prompt={"few_shot": [SHOT.model_dump()]})
    assert prompts.worded(described) == described.prompt
