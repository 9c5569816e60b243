"""Look into a run whose broken completions were mended, and at what stands beside a finished run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from finished import finish
from test_look import DATA, ID, Looked

from tasks.history import manifest_of, read_history
from tasks.look.compare import side
from tasks.look.contents import read_contents
from tasks.look.query import query
from tasks.look.row_id import RowId, Sample
from tasks.look.trace import trace

pytestmark = pytest.mark.usefixtures("no_fsync")

ROOT = Path(__file__).resolve().parents[1]

# Mended completions stand in for what was sampled.


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    repair = {"tokens": 40, "redraws": 3}
    return Looked(finish(tmp_path_factory.mktemp("mended"), iterations=1, data=DATA, repair=repair))


def of_step(looked: Looked, step: str) -> dict[tuple[Any, ...], Any]:
    rows = looked.whole("completions", 1).filter(pl.col("step") == step)
    return {tuple(row[name] for name in ID): row for row in rows.iter_rows(named=True)}


def test_a_judgment_shows_the_text_that_was_judged(mended: Looked) -> None:
    sampled, repaired = of_step(mended, "sample"), of_step(mended, "repair")
    changed = {one for one, row in repaired.items() if row["text"] != sampled[one]["text"]}
    assert changed
    judged = {tuple(row[name] for name in ID): row for row in mended.rows("judgments", 1, step="select", full=True)}
    assert judged.keys() == sampled.keys()
    for one, row in judged.items():
        assert row["text"] == (repaired.get(one) or sampled[one])["text"]
    one = next(iter(changed))
    longer = repaired[one]["text"][len(sampled[one]["text"]) :] if repaired[one]["text"].startswith("R") else ""
    found = mended.rows("judgments", 1, step="select", contains=repaired[one]["text"])
    assert one in {tuple(row[name] for name in ID) for row in found}, longer
    stale = {tuple(row[name] for name in ID) for row in mended.rows("judgments", 1, contains=sampled[one]["text"])}
    assert (one in stale) == (sampled[one]["text"] in repaired[one]["text"])


def test_completions_are_listed_once_and_the_sampled_ones_by_their_step(mended: Looked) -> None:
    sampled, repaired = of_step(mended, "sample"), of_step(mended, "repair")
    written = [row for row in mended.rows("completions", 1) if row["step"] in ("sample", "repair")]
    assert len(written) == len(sampled)
    assert {row["step"] for row in written if tuple(row[name] for name in ID) in repaired} == {"repair"}
    raw = mended.rows("completions", 1, step="sample")
    assert {tuple(row[name] for name in ID) for row in raw} == sampled.keys()
    for row in raw:
        one = tuple(row[name] for name in ID)
        assert row["text"] == sampled[one]["text"]
        assert ("status" in row) == (one not in repaired)


def test_a_mended_row_is_traced_to_its_repair(mended: Looked) -> None:
    repaired = of_step(mended, "repair")
    for one, row in repaired.items():
        pair, _, order, number, hinted = one
        found = trace(mended.contents, RowId(pair, order, (Sample(number, hinted),)))
        (judgment,) = [judgment for judgment in found.judgments if judgment["named"]]
        assert judgment["text"] == row["text"]
        assert judgment["step"] == "repair"


def test_columns_of_one_name_are_numbered(mended: Looked) -> None:
    answer = query(mended.contents, "SELECT 1 AS x, 2 AS x, 3 AS y, 4 AS x", limit=1)
    assert answer.columns == ("x", "x_2", "y", "x_3")
    assert answer.rows == [(1, 2, 3, 4)]


def test_a_run_is_not_shown_with_the_results_of_another_attempt(tmp_path: Path) -> None:
    """Its step was voided and another run has computed it again since."""
    first = finish(tmp_path, iterations=1, data=DATA)
    history = read_history(first.store, first.run.run_id)
    used = next(history.of("score"))
    first.store.void(used.key, "a test", "me")
    assert manifest_of(first.store, used) is None
    second = finish(tmp_path, iterations=1, data=DATA)
    again = next(one for one in read_history(second.store, second.run.run_id).used if one.key == used.key)
    assert (used.attempt, again.attempt) == (0, 1)
    assert manifest_of(first.store, used) is None
    assert manifest_of(first.store, again) is not None


INTERRUPTED = """
import os, signal, sys, threading
from storage.store import open_store
from tasks.look.contents import read_contents
from tasks.look.query import query
signal.signal(signal.SIGINT, signal.default_int_handler)
contents = read_contents(open_store(sys.argv[1], create=False), sys.argv[2])
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    query(contents, "SELECT count(*) FROM range(1000000000000::BIGINT) a, range(10) b", limit=1)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupted_query_is_an_interrupt(mended: Looked) -> None:
    """DuckDB tells Ctrl-C by an error of its own."""
    command = [sys.executable, "-c", INTERRUPTED, mended.done.store.url, mended.done.run.run_id]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "interrupted\n", done.stderr


def test_the_untrained_judge_is_checkpoint_0_without_a_warm_start(tmp_path: Path) -> None:
    done = finish(tmp_path, iterations=1, data=DATA, bootstrap=None, split={"bootstrap": 0})
    assert side(read_contents(done.store, done.run.run_id), "base").judge == "0"
