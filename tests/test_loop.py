"""The whole loop with the scripted engine and trainer: order, lineage, counts, methods, gates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
import small
from finished import Finished, finish
from outer import results

from storage.errors import StepFailedError
from storage.schema import JUDGMENT_ID
from tasks.engines.scripted import ScriptedEngine
from tasks.models import Model
from tasks.pairs import BOOTSTRAP

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.engines.base import Response

pytestmark = pytest.mark.usefixtures("no_fsync")

ID = list(JUDGMENT_ID)


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finish(tmp_path_factory.mktemp("sft"), sample={"order": "both"}, select={"keep_per_pair": 2})


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finish(
        tmp_path_factory.mktemp("dpo"),
        method="star-dpo",
        iterations=2,
        pairs={"data": "cumulative", "max_per_pair": 2},
        train={"init_from": "previous"},
    )


def test_the_loop_ends_at_the_last_checkpoint(sft: Finished) -> None:
    assert sft.judge.number == 3
    assert sft.judge.train == sft.manifests[3, "train", ""].key
    models = [sft.manifests[one, "train", ""].facts["model"]["adapter"] for one in range(4)]
    assert len(set(models)) == 4
    assert sft.judge.model.adapter == models[-1]


def test_the_order_of_the_steps(sft: Finished) -> None:
    """Each checkpoint is checked, evaluated on dev and gated before anything is sampled with it."""
    order = [(one["iteration"], one["step"]) for one in sft.events if one["step"] not in ("evaluate", "score")]
    expected = [(0, "base"), (0, "split"), (0, "bootstrap"), (0, "train")]
    for number in range(1, 4):
        expected += [(number - 1, "parity"), (number - 1, "gate")]
        expected += [(number, "sample"), (number, "select"), (number, "pairs"), (number, "train")]
    assert order == [*expected, (3, "parity"), (3, "gate")]
    place = {(one["iteration"], one["step"], one["label"]): at for at, one in enumerate(sft.events)}
    assert len(place) == len(sft.events)
    for number in range(4):
        dev = [at for (i, step, label), at in place.items() if i == number and step == "evaluate" and "dev" in label]
        assert place[number, "parity", ""] < min(dev)
        assert max(dev) < place[number, "score", "dev"] < place[number, "gate", ""]
        for suite in ("test", "ood"):
            assert (number, "score", suite) in place
    assert all((0, "score", f"base {suite}") in place for suite in ("test", "ood"))


def test_the_log_tells_the_steps(sft: Finished) -> None:
    names = ("iteration", "step", "label", "key", "attempt", "reused")
    logged = [
        tuple(one[name] for name in names)
        for one in sft.store.run_log(sft.run.run_id).records()
        if one["kind"] == "step"
    ]
    assert logged == [tuple(one[name] for name in names) for one in sft.events]
    assert not any(one["reused"] for one in sft.events)


def test_a_session_starts_one_engine(sft: Finished) -> None:
    """N + 1 starts: every step of a session tells the same one."""
    starts: dict[int, set[str]] = {}
    for (iteration, step, _), manifest in sft.manifests.items():
        if step in ("parity", "evaluate", "sample"):
            starts.setdefault(iteration - (step == "sample"), set()).add(manifest.facts["engine"]["start"])
    assert [len(starts[one]) for one in range(4)] == [1, 1, 1, 1]
    assert len(set.union(*starts.values())) == 4


def test_a_run_in_a_bucket_makes_what_a_run_in_a_folder_makes(sft: Finished, bucket: str, tmp_path: Path) -> None:
    there = finish(tmp_path, store=f"s3://{bucket}/runs", sample={"order": "both"}, select={"keep_per_pair": 2})
    assert results(there.store, there.run.run_id) == results(sft.store, sft.run.run_id)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_counts_add_up_in_every_manifest(request: pytest.FixtureRequest, method: str) -> None:
    done: Finished = request.getfixturevalue(method)
    counted = 0
    for (_, step, _), manifest in done.manifests.items():
        if step in ("base", "parity", "gate"):
            assert manifest.counts == {}
            continue
        counted += 1
        assert manifest.counts["in"] > 0
        assert manifest.counts["in"] == manifest.counts["kept"] + sum(manifest.counts["dropped"].values())
        assert all(number > 0 for number in manifest.counts["dropped"].values())
    assert counted > 25
    for one in done.iterations:
        sampled, selected = done.manifests[one, "sample", ""], done.manifests[one, "select", ""]
        assert sampled.counts["in"] == sampled.artifact("completions").rows == selected.counts["in"]
        assert selected.counts["kept"] == selected.artifact("selected").rows
        assert sum(selected.counts["dropped"].values()) == selected.artifact("dropped").rows
        assert done.manifests[one, "pairs", ""].counts["in"] == selected.counts["kept"]
        assert done.manifests[one, "train", ""].counts["in"] == done.manifests[one, "pairs", ""].artifact(method).rows


def test_sets_are_disjoint_and_whole(sft: Finished) -> None:
    """Trap 23: nothing that is evaluated trains."""
    assert set(sft.sets) == {"dev", "test", "bootstrap", "ood", "part-1", "part-2", "part-3"}
    ids = [one for members in sft.sets.values() for one in members]
    assert len(ids) == len(set(ids))
    sizes = [len(sft.sets[f"part-{one}"]) for one in sft.iterations]
    assert max(sizes) - min(sizes) <= 1
    assert set(sft.rows(0, "split", "pairs")["pair_id"]) == set(ids)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_rows_come_from_their_part(request: pytest.FixtureRequest, method: str) -> None:
    done: Finished = request.getfixturevalue(method)
    held_out = done.sets["dev"] | done.sets["test"] | done.sets["ood"]
    for one in done.iterations:
        part = done.sets[f"part-{one}"]
        assert set(done.rows(one, "sample", "completions")["pair_id"]) == part
        rows = done.rows(one, "pairs", method)
        fresh = rows.filter(pl.col("checkpoint") == model(done, one - 1))
        assert fresh.height > 0
        assert set(fresh["pair_id"]) <= part
        assert not set(rows["pair_id"]) & held_out
    assert set(done.rows(0, "bootstrap", "sft")["pair_id"]) <= done.sets["bootstrap"]


def model(done: Finished, checkpoint: int) -> str:
    """Give the digest of a checkpoint of a run with a warm start."""
    return Model(**done.manifests[checkpoint, "train", ""].facts["model"]).digest


def test_sft_rows_join_to_what_they_come_from(sft: Finished) -> None:
    for one in sft.iterations:
        completions = sft.rows(one, "sample", "completions")
        judgments, selected = sft.rows(one, "select", "judgments"), sft.rows(one, "select", "selected")
        rows = sft.rows(one, "pairs", "sft")
        assert rows.height == selected.height > 0
        assert rows.unique(ID).height == rows.height
        assert rows.join(selected, on=ID, how="anti").height == 0
        joined = rows.join(completions, on=ID, how="inner", validate="1:1").join(judgments, on=ID, how="inner")
        assert joined.height == rows.height
        assert set(joined["status"]) == {"correct"}
        assert set(joined["finish_reason"]) == {"stop"}
        said = joined["completion"].list.first().struct.field("content")
        assert all(text.startswith(kept) for text, kept in zip(joined["text"], said, strict=True))
        assert (said.str.slice(-5) == "[[" + joined["verdict"] + "]]").all()
        dropped = sft.rows(one, "select", "dropped")
        assert pl.concat([selected.select(ID), dropped.select(ID)]).sort(ID).equals(judgments.select(ID).sort(ID))
        assert judgments.select(ID).sort(ID).equals(completions.select(ID).sort(ID))


def test_gold_is_what_the_verdict_says(sft: Finished) -> None:
    """The letter as shown, mapped back to the response as stored, is the pair's gold."""
    gold = sft.rows(0, "split", "pairs").select("pair_id", "gold")
    for one in sft.iterations:
        rows = sft.rows(one, "select", "judgments").filter(pl.col("status") == "correct").join(gold, on="pair_id")
        swapped = pl.when(pl.col("verdict") == "A").then(pl.lit("B")).otherwise(pl.lit("A"))
        stored = pl.when(pl.col("order") == "ab").then("verdict").otherwise(swapped)
        assert (rows.select(stored).to_series() == rows["gold"]).all()
        assert set(rows["order"]) == {"ab", "ba"}


def test_both_orders_are_asked(sft: Finished, dpo: Finished) -> None:
    for one in sft.iterations:
        both = sft.rows(one, "sample", "completions").group_by("pair_id").agg(pl.len(), pl.col("order").n_unique())
        assert set(both["order"]) == {2}
        assert set(both["len"]) == {2 * 4}
    for one in dpo.iterations:
        hashed = dpo.rows(one, "sample", "completions").group_by("pair_id").agg(pl.col("order").n_unique())
        assert set(hashed["order"]) == {1}


def test_dpo_rows_hold_a_right_and_a_wrong_answer_to_one_prompt(dpo: Finished) -> None:
    for one in dpo.iterations:
        judgments, completions = dpo.rows(one, "select", "judgments"), dpo.rows(one, "sample", "completions")
        rows = dpo.rows(one, "pairs", "dpo").filter(pl.col("checkpoint") == model(dpo, one - 1))
        assert rows.height > 0
        asked = ["pair_id", "checkpoint", "order"]
        assert max(rows.group_by(asked).len()["len"].to_list()) <= 2
        for side, status in (("chosen", "correct"), ("rejected", "wrong")):
            on = [*asked, f"{side}_sample", f"{side}_hinted"]
            named = judgments.join(completions, on=ID).rename({"sample": on[3], "hinted": on[4]})
            joined = rows.join(named, on=on, how="inner")
            assert joined.height == rows.height
            assert set(joined["status"]) == {status}
            said = joined[side].list.first().struct.field("content")
            assert all(text.startswith(kept) for text, kept in zip(joined["text"], said, strict=True))
        pairs = {row["pair_id"]: row for row in dpo.rows(0, "split", "pairs").to_dicts()}
        for row in rows.to_dicts():
            pair = pairs[row["pair_id"]]
            first, second = ("response_a", "response_b") if row["order"] == "ab" else ("response_b", "response_a")
            assert f"A: {pair[first]}\nB: {pair[second]}" in row["prompt"][-1]["content"]
            assert row["chosen"] != row["rejected"]


def test_cumulative_dpo_rows_and_a_judge_that_goes_on(dpo: Finished) -> None:
    """The warm start's rows are SFT rows: DPO begins with none of them."""
    assert dpo.judge.number == 2
    one, two = dpo.rows(1, "pairs", "dpo"), dpo.rows(2, "pairs", "dpo")
    assert dpo.manifests[1, "pairs", ""].facts["earlier"] == 0
    assert dpo.manifests[2, "pairs", ""].facts["earlier"] == one.height
    assert two.join(one, on=[name for name in one.columns[:7]], how="semi").height == one.height
    assert two.height > one.height
    start = dpo.manifests[2, "train", ""].inputs
    assert start["start"] == model(dpo, 1)
    assert start["reference"] == dpo.manifests[0, "base", ""].facts["model"]["base"]


def test_cumulative_sft_rows_hold_all_so_far(tmp_path: Path) -> None:
    done = finish(tmp_path, iterations=2, evaluate={"base": False}, pairs={"data": "cumulative"})
    warm, one, two = done.rows(0, "bootstrap", "sft"), done.rows(1, "pairs", "sft"), done.rows(2, "pairs", "sft")
    assert warm.height < one.height < two.height
    for earlier, later in ((warm, one), (one, two)):
        kept = later.join(earlier, on=ID, how="semi")
        assert kept.sort(ID).equals(earlier.sort(ID))
    assert set(two["checkpoint"]) == {BOOTSTRAP, model(done, 0), model(done, 1)}
    assert done.manifests[2, "pairs", ""].facts["earlier"] == one.height
    assert done.manifests[2, "train", ""].counts["in"] == two.height


def test_a_warm_start_takes_the_pairs_that_have_rationales(tmp_path: Path) -> None:
    untaught = {"categories": ["number"], "count": 60, "rationales": False}
    sources = [
        {"name": "taught", "generator": {"categories": ["capitals", "question"], "count": 60}},
        {"name": "untaught", "generator": untaught},
    ]
    done = finish(tmp_path, iterations=1, data={"sources": sources, "suites": []})
    splits = done.rows(0, "split", "splits")
    by_split = {str(name): set(rows["source"]) for (name,), rows in splits.group_by("split")}
    assert by_split["bootstrap"] == {"taught"}
    assert by_split["part-1"] == by_split["test"] == {"taught", "untaught"}
    assert done.rows(0, "bootstrap", "sft").height == 12


def test_without_a_warm_start_the_base_judges_first(tmp_path: Path) -> None:
    done = finish(tmp_path, iterations=1, bootstrap=None, split={"bootstrap": 0})
    steps = {(one["iteration"], one["step"]) for one in done.events}
    assert not steps & {(0, "bootstrap"), (0, "train"), (0, "parity")}
    assert {(0, "gate"), (1, "train"), (1, "parity"), (1, "gate")} <= steps
    assert not any(one["label"].startswith("base") for one in done.events)
    base = done.manifests[0, "base", ""].facts["model"]["base"]
    assert set(done.rows(1, "sample", "completions")["checkpoint"]) == {base}
    assert done.judge.number == 1


class Weakening(ScriptedEngine):
    """Give the forced choice against gold once a checkpoint is served that is not among those that are strong."""

    def __init__(self, strong: bool) -> None:
        super().__init__()
        self._strong = strong

    def poll(self) -> list[Response]:
        return [replace(one, letter_logprobs=self._letters(one)) for one in super().poll()]

    def _letters(self, response: Response) -> tuple[float, float] | None:
        """Say A for a pair whose gold is shown as A, or the contrary; tests tell it which by `GOLD`."""
        if response.letter_logprobs is None:
            return None
        shown_a = (GOLD[response.tag[2]] == "A") == (response.tag[3] == "ab")
        return (-0.1, -3.0) if shown_a == self._strong else (-3.0, -0.1)


GOLD: dict[str, str] = {}


def test_the_gate_stops_a_judge_that_is_worse_on_dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"iterations": 2, "data": {"suites": []}, "split": {"dev": 0.3}, "bootstrap": None}
    store, run = small.start(small.config(tmp_path, **changes))
    pairs = store.read(run.split(run.base()).artifact("pairs"))
    GOLD.update(zip(pairs["pair_id"].to_pylist(), pairs["gold"].to_pylist(), strict=True))
    monkeypatch.setattr("tasks.jobs.entry.start_engine", lambda context, plan, first: Weakening(plan.checkpoint == 0))
    done = finish(tmp_path, **changes)
    assert done.judge.number == 1
    decisions = [done.manifests[number, "gate", ""].facts for number in (0, 1)]
    assert [one["decision"] for one in decisions] == ["go", "stop"]
    assert decisions[1]["difference"] < 0
    assert "Worse than the checkpoint before" in decisions[1]["reason"]
    assert not [one for one in done.events if one["iteration"] == 2]
    assert (1, "score", "test") in done.manifests  # the stopped judge is evaluated all the same

    goes_on = finish(tmp_path, **changes, gate={"on_worse": "continue"})
    assert goes_on.judge.number == 2
    assert "goes on because" in goes_on.manifests[1, "gate", ""].facts["reason"]


def test_a_judge_without_verdicts_is_stopped_before_it_samples(tmp_path: Path) -> None:
    done = finish(tmp_path, iterations=2, gate={"min_parse_rate": 1.0}, evaluate={"base": False})
    assert done.judge.number == 0
    assert done.manifests[0, "gate", ""].facts["decision"] == "stop"
    assert "min_parse_rate" in done.manifests[0, "gate", ""].facts["reason"]
    assert not [one for one in done.events if one["step"] in ("sample", "select", "pairs") or one["iteration"] > 0]


def test_no_right_verdict_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StepFailedError) as failed:
        finish(tmp_path, iterations=1, bootstrap=None, select={"min_right": 1.0, "max_right": 0.0})
    said = str(failed.value)
    assert said.startswith("iteration 1 kept no training row (see `starwheel show small-")
    assert "\n" not in said
    store, run = small.start(small.config(tmp_path, iterations=1))
    runs = [one for one in store.runs() if one != run.run_id]
    steps = [one["step"] for one in store.run_log(runs[0]).records() if one["kind"] == "step"]
    assert steps[-2:] == ["select", "pairs"]  # what led there is committed and can be looked at
