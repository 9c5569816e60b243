"""Look into real runs of the scripted engine and trainer: rows and filters, lineage, comparisons, SQL, files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from finished import Finished, finish

from storage.errors import CorruptArtifactError, DataError
from storage.schema import JUDGMENT_ID, SCHEMAS
from storage.store import open_store
from tasks.judge import paired_scores
from tasks.look.compare import compare, flipped_pairs, side
from tasks.look.contents import read_contents
from tasks.look.notebook import LIBRARIES, reading_line
from tasks.look.overview import look_at_iteration
from tasks.look.query import query, views
from tasks.look.row_id import RowId, Sample, parse_id
from tasks.look.rows import Filters, find_rows
from tasks.look.trace import trace
from tasks.models import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("no_fsync")

ID = list(JUDGMENT_ID)
DATA = {
    "sources": [{"name": "made", "generator": {"categories": ["capitals", "question"], "count": 70}}],
    "suites": [{"name": "ood", "generator": {"categories": ["quotes"], "count": 6}}],
}


class Looked:
    """A finished run and what it holds."""

    def __init__(self, done: Finished) -> None:
        self.done = done
        self.contents = read_contents(done.store, done.run.run_id)

    def rows(self, kind: str, iteration: int, *, limit: int = 10_000, full: bool = False, **filters: Any) -> list[Any]:
        return find_rows(self.contents, kind, iteration, Filters(**filters), limit=limit, full=full).rows

    def whole(self, kind: str, iteration: int) -> pl.DataFrame:
        """Read all rows of a kind without the code under test."""
        read = self.done.store.read
        tables = [
            pl.DataFrame(read(manifest.artifacts[kind])).with_columns(
                pl.lit(step).alias("step"), pl.lit(label).alias("label")
            )
            for (number, step, label), manifest in self.done.manifests.items()
            if number == iteration and kind in manifest.artifacts
        ]
        return pl.concat(tables)

    def judgments(self, iteration: int) -> pl.DataFrame:
        """Join judgments, texts and pairs without the code under test."""
        texts = self.whole("completions", iteration).select(*ID, "text")
        subsets = self.whole("pairs", 0).select("pair_id", "subset")
        judged = self.whole("judgments", iteration)
        return judged.join(texts, on=ID, validate="1:1").join(subsets, on="pair_id", validate="m:1")


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    folder = tmp_path_factory.mktemp("dpo")
    pairs = {"data": "cumulative", "max_per_pair": 2}
    train = {"init_from": "previous"}
    return Looked(finish(folder, method="star-dpo", iterations=2, data=DATA, pairs=pairs, train=train))


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    folder = tmp_path_factory.mktemp("sft")
    sample = {"order": "both", "n": 1}
    rationalize = {"failures": True, "max_share": 0.5}
    return Looked(finish(folder, iterations=2, data=DATA, sample=sample, rationalize=rationalize))


@pytest.fixture(scope="module")
def genrm(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    data = {"sources": [{"name": "made", "generator": {"categories": ["number"], "count": 70}}], "suites": []}
    return Looked(finish(tmp_path_factory.mktemp("genrm"), method="genrm", iterations=1, data=data))


# Rows.

FILTERS: dict[str, tuple[Mapping[str, Any], Callable[[Looked, int], pl.Expr]]] = {
    "all": ({}, lambda looked, i: pl.lit(True)),
    "status": ({"status": "wrong"}, lambda looked, i: pl.col("status") == "wrong"),
    "subset": ({"subset": "question"}, lambda looked, i: pl.col("subset") == "question"),
    "hinted": ({"hinted": True}, lambda looked, i: pl.col("hinted")),
    "contains": ({"contains": "(1"}, lambda looked, i: pl.col("text").str.contains("(1", literal=True)),
    "step": ({"step": "score test"}, lambda looked, i: (pl.col("step") == "score") & (pl.col("label") == "test")),
    "flipped": ({"flipped": True}, lambda looked, i: pl.col("pair_id").is_in(flipped(looked, i))),
    "several": (
        {"status": "correct", "subset": "capitals", "contains": "[[B]]", "step": "select"},
        lambda looked, i: (
            (pl.col("status") == "correct")
            & (pl.col("subset") == "capitals")
            & pl.col("text").str.contains("[[B]]", literal=True)
            & (pl.col("step") == "select")
        ),
    ),
}


def flipped(looked: Looked, iteration: int) -> list[str]:
    """Find the pairs whose forced choice changed sides, without the code under test."""

    def right(number: int) -> dict[str, bool]:
        scores = looked.whole("pair_scores", number).filter(~pl.col("label").str.starts_with("base "))
        return {row["pair_id"]: row["forced_choice"] > 0.5 for row in scores.to_dicts()}

    now, before = right(iteration), right(iteration - 1)
    return [pair_id for pair_id in now if now[pair_id] != before[pair_id]]


@pytest.mark.parametrize("name", FILTERS)
def test_filters_give_the_rows_that_they_name(sft: Looked, name: str) -> None:
    filters, wanted = FILTERS[name]
    for iteration in (1, 2):
        expected = sft.judgments(iteration).filter(wanted(sft, iteration))
        found = sft.rows("judgments", iteration, **filters)
        assert expected.height > 0
        assert (name == "all") == (expected.height == sft.judgments(iteration).height)
        assert (
            pl.DataFrame(found)
            .select(*ID, "text", "status")
            .sort(ID)
            .equals(expected.select(*ID, "text", "status").sort(ID))
        )


def test_pages_hold_every_row_once(dpo: Looked) -> None:
    whole = dpo.rows("judgments", 1)
    paged = []
    for offset in range(0, len(whole) + 7, 7):
        page = find_rows(dpo.contents, "judgments", 1, Filters(), limit=7, offset=offset)
        assert page.total == len(whole)
        assert len(page.rows) <= 7
        paged += page.rows
    assert paged == whole


@pytest.mark.parametrize("kind", ["judgments", "completions", "selected", "dropped", "sft", "pairs"])
def test_an_id_names_its_row(sft: Looked, kind: str) -> None:
    iteration = 0 if kind == "pairs" else 1
    for row in sft.rows(kind, iteration, limit=5):
        assert sft.rows(kind, iteration, id=parse_id(row["id"])) == [row]
        assert row in sft.rows(kind, iteration, id=parse_id(row["id"].partition(":")[0][:15]))


def test_an_id_names_its_dpo_row(dpo: Looked) -> None:
    for row in dpo.rows("dpo", 2):
        assert dpo.rows("dpo", 2, id=parse_id(row["id"])) == [row]


def test_every_artifact_can_be_listed(sft: Looked, dpo: Looked, genrm: Looked) -> None:
    seen = set()
    for looked in (sft, dpo, genrm):
        for iteration, step, label in looked.done.manifests:
            for kind, artifact in looked.done.manifests[iteration, step, label].artifacts.items():
                page = find_rows(looked.contents, kind, iteration, Filters(), limit=3, full=True)
                assert page.total >= artifact.rows
                assert all(set(SCHEMAS[kind].names) <= set(row) for row in page.rows)
                seen.add(kind)
    assert seen == set(SCHEMAS)


def test_a_row_in_full_holds_its_pair(sft: Looked) -> None:
    pairs = {row["pair_id"]: row for row in sft.whole("pairs", 0).drop("step", "label").to_dicts()}
    for row in sft.rows("judgments", 1, full=True):
        assert {name: row[name] for name in SCHEMAS["pairs"].names} == pairs[row["pair_id"]]
    assert {row["judge"] for row in sft.rows("judgments", 1)} == {"checkpoint 0", "checkpoint 1"}


REFUSED = {
    "no such iteration": (("judgments", 9, {}), "has no iteration 9; it has 0, 1, 2"),
    "no such artifact": (("dpo", 1, {}), "there is no artifact 'dpo'; there are completions"),
    "no such step": (("judgments", 1, {"step": "train"}), "no step 'train' made judgments; made by select, score dev"),
    "no status": (("metrics", 1, {"status": "wrong"}), "--status: metrics has no column status; ask judgments"),
    "no text": (("metrics", 1, {"contains": "x"}), "--contains: metrics has no text"),
    "no pair": (("judgments", 1, {"id": RowId("pffffffffffff")}), "has no one pair pffffffffffff"),
    "several pairs": (("judgments", 1, {"id": RowId("p")}), "has no one pair p; it may be p"),
    "no order": (("pairs", 0, {"id": RowId("p", "ab")}), "rows of pairs are not told apart so finely"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_listed_is_a_sentence(sft: Looked, case: str) -> None:
    (kind, iteration, filters), said = REFUSED[case]
    with pytest.raises(DataError, match=re.escape(said)) as refused:
        sft.rows(kind, iteration, **filters)
    assert "\n" not in str(refused.value)


# Lineage.


def check_back(looked: Looked, found: Mapping[str, Any], pair_id: str) -> None:
    """Hold source row and split against the split step, each judge against the step that made it."""
    splits = looked.whole("splits", 0).filter(pl.col("pair_id") == pair_id).to_dicts()
    assert [(one["source"], one["row"], one["split"]) for one in found["sources"]] == [
        (one["source"], one["row"], one["split"]) for one in splits
    ]
    assert {one["address"] for one in found["sources"]} == {"made by the generator"}
    models = {
        Model(**one.facts["model"]).digest: one.key for one in looked.done.manifests.values() if "model" in one.facts
    }
    for one in found["judgments"]:
        assert one["made_by"] == models[one["checkpoint"]]


def test_every_dpo_row_is_traced(dpo: Looked) -> None:
    for iteration in (1, 2):
        rows = dpo.whole("dpo", iteration).to_dicts()
        listed = dpo.rows("dpo", iteration)
        assert len(rows) == len(listed) > 10
        by_id = {tuple(row[name] for name in SCHEMAS["dpo"].names[:7]): row for row in rows}
        for shown in listed:
            row = by_id[tuple(shown[name] for name in SCHEMAS["dpo"].names[:7])]
            found = trace(dpo.contents, parse_id(shown["id"])).to_json()
            check_back(dpo, found, row["pair_id"])
            named = {(one["sample"], one["hinted"]): one for one in found["judgments"] if one["named"]}
            assert set(named) == {(row[f"{part}_sample"], row[f"{part}_hinted"]) for part in ("chosen", "rejected")}
            for part, status in (("chosen", "correct"), ("rejected", "wrong")):
                one = named[row[f"{part}_sample"], row[f"{part}_hinted"]]
                assert one["text"].startswith(row[part][0]["content"])
                assert (one["status"], one["outcome"], one["order"]) == (status, "selected", row["order"])
                assert one["checkpoint"] == row["checkpoint"]
            made = next(int(one["split"][-1]) for one in found["sources"])  # the part that is sampled in this iteration
            assert [one["iteration"] for one in found["rows"]] == list(range(made, 3))
            assert all(one["chosen"] == row["chosen"] for one in found["rows"])
            assert [one["checkpoint"] for one in found["checkpoints"]] == list(range(made, 3))


@pytest.mark.parametrize("method", ["dpo", "sft"])
def test_every_selected_row_is_traced(request: pytest.FixtureRequest, method: str) -> None:
    looked: Looked = request.getfixturevalue(method)
    for iteration in (1, 2):
        listed = looked.rows("selected", iteration)
        trained = looked.whole(method, iteration)
        assert len(listed) == looked.whole("selected", iteration).height > 10
        for row in listed:
            found = trace(looked.contents, parse_id(row["id"])).to_json()
            check_back(looked, found, row["pair_id"])
            (named,) = (one for one in found["judgments"] if one["named"])
            assert (named["text"], named["status"], named["outcome"]) == (row["text"], row["status"], "selected")
            assert {one["order"] for one in found["rows"]} <= {row["order"]}
            sides = ["sample"] if method == "sft" else ["chosen_sample", "rejected_sample"]
            same = pl.any_horizontal(
                (pl.col(name) == row["sample"]) & (pl.col(name.replace("sample", "hinted")) == row["hinted"])
                for name in sides
            )
            of_pair = (pl.col("pair_id") == row["pair_id"]) & (pl.col("order") == row["order"])
            here = [one for one in found["rows"] if one["iteration"] == iteration]
            assert len(here) == trained.filter(of_pair & same).height
            trained_now = [one["checkpoint"] for one in found["checkpoints"] if one["how"] == "trained on it"]
            assert (iteration in trained_now) == bool(here)


def test_a_dropped_judgment_says_why(sft: Looked) -> None:
    for row in sft.rows("dropped", 1, limit=10):
        found = trace(sft.contents, parse_id(row["id"]))
        (named,) = (one for one in found.judgments if one["named"])
        assert named["outcome"] == f"dropped: {row['reason']}"
        assert not found.rows
        assert not found.checkpoints


def test_a_checkpoint_that_goes_on_is_named(dpo: Looked) -> None:
    """The warm start's rows trained checkpoint 0; with init_from previous, 1 and 2 went on from it."""
    (row,) = dpo.rows("sft", 0, limit=1)
    found = trace(dpo.contents, parse_id(row["id"]))
    assert [one["how"] for one in found.checkpoints] == [
        "trained on it",
        "goes on from checkpoint 0",
        "goes on from checkpoint 1",
    ]
    (rationale,) = found.judgments
    assert rationale["judge"] == "bootstrap"
    assert row["completion"][0]["content"] in rationale["text"]


def test_a_test_pair_is_traced_through_all_judges(dpo: Looked) -> None:
    (row,) = dpo.rows("judgments", 2, step="score test", limit=1)
    found = trace(dpo.contents, parse_id(row["pair_id"]))
    assert [one["split"] for one in found.sources] == ["test"]
    judges = dict.fromkeys(one["judge"] for one in found.judgments)
    assert list(judges) == ["checkpoint 0", "the base model", "checkpoint 1", "checkpoint 2"]
    assert len(found.judgments) == 4 * 2 * 2
    assert all(one["text"] and one["status"] for one in found.judgments)
    assert not found.rows


def test_a_judge_without_reasons_is_traced(genrm: Looked) -> None:
    (row,) = genrm.rows("sft", 1, limit=1)
    found = trace(genrm.contents, parse_id(row["pair_id"]))
    assert found.rows
    assert [one["checkpoint"] for one in found.checkpoints] == [1]
    (reading,) = genrm.rows("choices", 1, limit=1)
    found = trace(genrm.contents, parse_id(reading["id"]))
    assert all(one["prob_a"] is not None for one in found.judgments)
    assert {one["order"] for one in found.judgments if one["named"]} == {reading["order"]}


def test_nothing_of_this_id_is_a_sentence(dpo: Looked) -> None:
    (row,) = dpo.rows("selected", 1, limit=1)
    with pytest.raises(DataError, match=f"has nothing of {row['pair_id']}:{row['order']}:99; of this pair it has p"):
        trace(dpo.contents, RowId(row["pair_id"], row["order"], (Sample(99, False),)))


# Comparisons.


def test_two_judges_of_one_run(dpo: Looked) -> None:
    found = compare(side(dpo.contents, "0"), side(dpo.contents, "2"), limit=3)
    assert (found.before, found.now) == (f"{dpo.done.run.run_id}@0", f"{dpo.done.run.run_id}@2")
    assert not found.settings
    assert [(then, now.iteration if now else None) for then, now in found.yields] == [(None, 2)]
    assert {one.suite for one in found.metrics} == {"dev", "test", "ood"}
    before = dpo.whole("metrics", 0).filter(
        (pl.col("label") == "test") & (pl.col("metric") == "forced_choice") & (pl.col("subset") == "")
    )
    (same,) = (one for one in found.metrics if (one.suite, one.metric) == ("test", "forced_choice"))
    assert same.before.value == pytest.approx(before["value"][0])
    assert same.before.low == pytest.approx(before["low"][0])
    assert len(found.flips) == min(3, sum(sum(one.values()) for one in found.flipped.values()))
    assert all(one["prompt"] for one in found.flips)
    changes = [abs(one["now"] - one["before"]) for one in found.flips]
    assert changes == sorted(changes, reverse=True)


def test_two_runs(dpo: Looked, sft: Looked) -> None:
    found = compare(side(dpo.contents, None), side(sft.contents, None), limit=5)
    assert "method star-dpo → star-sft" in found.settings
    assert "sample.n 4 → 1" in found.settings
    assert not any(line.startswith(("pairs of", "splits of")) for line in found.settings)
    assert [now.iteration for _, now in found.yields if now] == [1, 2]
    back = compare(side(sft.contents, None), side(dpo.contents, None), limit=5)
    assert {one.difference.value for one in back.metrics} == {-one.difference.value for one in found.metrics}
    assert {suite: one["gained"] for suite, one in found.flipped.items()} == {
        suite: one["lost"] for suite, one in back.flipped.items()
    }


def test_the_untrained_judge_has_a_side(dpo: Looked) -> None:
    found = compare(side(dpo.contents, "base"), side(dpo.contents, "0"), limit=1)
    assert {one.suite for one in found.metrics} == {"test", "ood"}
    assert sorted(flipped_pairs(dpo.contents, 0)) == sorted(
        pair_id
        for suite in ("test", "ood")
        for pair_id in paired_scores.flips(
            *(
                dpo.done.store.read(dpo.done.manifests[0, "score", label].artifact("pair_scores"))
                for label in (suite, f"base {suite}")
            )
        )["pair_id"]
    )


def test_sides_that_are_not_there_are_sentences(dpo: Looked, genrm: Looked) -> None:
    with pytest.raises(DataError, match="has no scored judge 7; scored are 0, 1, 2, base"):
        side(dpo.contents, "7")
    with pytest.raises(DataError, match="answered no pair in common"):
        compare(side(dpo.contents, None), side(genrm.contents, None), limit=1)


# SQL and files.


def test_views_hold_every_row(dpo: Looked) -> None:
    for view in views(dpo.contents):
        answer = query(dpo.contents, f"SELECT iteration, step, label, count(*) FROM {view.name} GROUP BY ALL", limit=99)
        expected = {
            place: manifest.artifacts[view.name].rows
            for place, manifest in dpo.done.manifests.items()
            if view.name in manifest.artifacts and manifest.artifacts[view.name].rows
        }
        assert {row[:3]: row[3] for row in answer.rows} == expected
        assert sum(expected.values()) == view.rows


def test_views_join_on_ids(dpo: Looked) -> None:
    sql = """
        SELECT d.pair_id, j.status FROM dpo d JOIN judgments j ON (j.pair_id, j.checkpoint, j."order", j.sample)
        = (d.pair_id, d.checkpoint, d."order", d.rejected_sample) WHERE d.iteration = 1
    """
    answer = query(dpo.contents, sql, limit=1000)
    assert answer.columns == ("pair_id", "status")
    assert len(answer.rows) == dpo.whole("dpo", 1).height
    assert {row[1] for row in answer.rows} == {"wrong"}


def test_a_long_answer_is_cut(dpo: Looked) -> None:
    answer = query(dpo.contents, "SELECT pair_id FROM judgments", limit=5)
    assert (len(answer.rows), answer.more) == (5, True)
    assert not query(dpo.contents, "SELECT 1", limit=1).more


SHUT = {
    "another file": ("SELECT * FROM read_text('{file}')", "disabled"),
    "another file as a table": ("SELECT * FROM '{file}'", "does not exist"),
    "a list of files": ("SELECT * FROM glob('{file}')", "disabled"),
    "writing a file": ("COPY (SELECT 1) TO '{file}'", "give one SELECT"),
    "writing by EXPLAIN": (
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{artifact}' (FORMAT parquet, USE_TMP_FILE false)",
        "give one SELECT",
    ),
    "writing over an artifact": ("COPY (SELECT 1) TO '{artifact}' (USE_TMP_FILE false)", "give one SELECT"),
    "another database": ("ATTACH '{file}'", "give one SELECT"),
    "a table": ("CREATE TABLE t AS SELECT 1", "give one SELECT"),
    "a setting": ("SET enable_external_access = true", "give one SELECT"),
    "an extension": ("INSTALL httpfs", "give one SELECT"),
    "two statements": ("SELECT 1; SELECT 2", "give one SELECT"),
    "nothing": (" ", "give one SELECT"),
    "a variable": ("SELECT * FROM placed", "does not exist"),
    "no view": ("SELECT * FROM judgements", "the views are pairs, splits"),
    "no SQL": ("SELEKT 1", "syntax error"),
    "a wrong value": ("SELECT sample::INTEGER + text::INTEGER FROM completions", "Could not convert"),
}


@pytest.mark.parametrize("case", SHUT)
def test_a_query_reads_its_views_alone(dpo: Looked, tmp_path: Path, case: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    artifact = dpo.contents.fetch(dpo.contents.placed("metrics", 1))
    file = next(iter(artifact.values()))[0]
    before = file.read_bytes()
    sql, said = SHUT[case]
    with pytest.raises(DataError, match=re.escape(said)) as refused:
        query(dpo.contents, sql.format(file=secret, artifact=file), limit=10)
    assert "\n" not in str(refused.value)
    assert secret.read_text() == "key"
    assert file.read_bytes() == before


def test_only_what_a_query_names_is_fetched(tmp_path: Path) -> None:
    done = finish(tmp_path, iterations=1, data=DATA, bootstrap=None, split={"bootstrap": 0})
    for manifest in done.manifests.values():
        for file in manifest.artifacts["completions"].files if "completions" in manifest.artifacts else ():
            (tmp_path / "store" / file.path).unlink()
    store = open_store(str(tmp_path / "store"), cache=tmp_path / "empty cache", create=False)
    contents = read_contents(store, done.run.run_id)
    assert query(contents, "SELECT count(*) FROM judgments", limit=1).rows[0][0] > 0
    assert find_rows(contents, "metrics", 1, Filters(), limit=1).rows
    with pytest.raises(CorruptArtifactError, match=r"completions/part-.* is missing; .*void"):
        query(contents, "SELECT count(*) FROM Completions", limit=1)


def test_lost_steps_are_told(tmp_path: Path) -> None:
    done = finish(tmp_path, iterations=1, data=DATA, bootstrap=None, split={"bootstrap": 0})
    done.store.void(done.manifests[1, "select", ""].key, "a test", "me")
    contents = read_contents(done.store, done.run.run_id)
    assert [str(place) for place in contents.lost] == ["select 1"]
    with pytest.raises(DataError, match="there is no artifact 'selected'"):
        find_rows(contents, "selected", 1, Filters(), limit=1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_line_for_a_notebook_reads_the_rows(dpo: Looked, library: str, tmp_path: Path) -> None:
    placed = dpo.contents.asked("completions", 1, "sample")
    files = [file for files in dpo.contents.fetch(placed).values() for file in files]
    assert len(files) > 1
    code = f"{reading_line(files, library)}; print('read:', json.dumps(list(rows['text'])))"
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = done.stdout.partition("read: ")[2]
    assert json.loads(told) == [text for file in files for text in pq.read_table(file)["text"].to_pylist()]


def test_an_iteration_as_a_whole(sft: Looked) -> None:
    seen = look_at_iteration(sft.done.store, sft.done.run.run_id, 1)
    pairs = sft.done.manifests[1, "pairs", ""]
    assert seen.prompts == pairs.facts["yields"]
    assert {(one.judge, one.suite) for one in seen.scores} == {("1", "dev"), ("1", "test"), ("1", "ood")}
    assert seen.gate is not None
    assert seen.gate.startswith("go: No evidence")
    warm = look_at_iteration(sft.done.store, sft.done.run.run_id, 0)
    assert warm.prompts == {}
    assert {one.judge for one in warm.scores} == {"0", "base"}
