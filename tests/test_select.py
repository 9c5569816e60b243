"""Choose judgments: every one selected or dropped with a reason; by lot, never by length."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from judge_cases import check_golden, fixed_case, ids, judgment, table

from configs.run import SelectConfig
from storage.schema import SCHEMAS, Status
from tasks import select
from tasks.judge.verdict import judge

if TYPE_CHECKING:
    import pyarrow as pa

_WORDS = {"c": "correct", "w": "wrong", "t": "tie", "u": "unparsed", "b": "both", "x": "truncated", "e": "error"}


def samples(name: str, statuses: str, **other: Any) -> list[dict[str, Any]]:
    return [judgment(name, _WORDS[letter], sample=number, **other) for number, letter in enumerate(statuses)]


def run(rows: list[dict[str, Any]], seed: int = 0, **config: Any) -> tuple[pa.Table, Counter[str]]:
    selected, dropped = select.select(table("judgments", rows), SelectConfig(**config), seed=seed)
    return checked(rows, selected, dropped)


def sides(rows: list[dict[str, Any]], unparsed: bool = False, **config: Any) -> tuple[pa.Table, Counter[str]]:
    made = select.select_sides(table("judgments", rows), SelectConfig(**config), seed=0, unparsed_rejected=unparsed)
    return checked(rows, *made)


def checked(rows: list[dict[str, Any]], selected: pa.Table, dropped: pa.Table) -> tuple[pa.Table, Counter[str]]:
    """Hold that rows in = rows kept + rows dropped, each with one reason."""
    assert (selected.schema, dropped.schema) == (SCHEMAS["selected"], SCHEMAS["dropped"])
    assert Counter(ids(selected)) + Counter(ids(dropped)) == Counter(
        (r["pair_id"], r["order"], r["sample"]) for r in rows
    )
    assert dropped.column("reason").null_count == 0
    return selected, Counter(dropped.column("reason").to_pylist())


def test_only_right_verdicts_are_kept_and_statuses_are_reasons() -> None:
    """Traps, rule 21: truncated text never enters training."""
    selected, reasons = run(samples("p", "cwtubxe"))
    assert set(selected.column("status").to_pylist()) == {"correct"}
    assert reasons == Counter(["wrong", "tie", "unparsed", "both", "truncated", "error"])


def test_keep_per_pair_counts_pair_and_order() -> None:
    rows = samples("p", "cccc") + samples("p", "cccc", order="ba") + samples("q", "cw")
    selected, reasons = run(rows, keep_per_pair=2)
    kept = Counter((name, order) for name, order, _ in ids(selected))
    assert kept == {("p", "ab"): 2, ("p", "ba"): 2, ("q", "ab"): 1}
    assert reasons == {"enough_of_pair": 4, "wrong": 1}


def test_keep_all() -> None:
    assert run(samples("p", "cccc"), keep_per_pair=None)[0].num_rows == 4


def test_what_is_kept_depends_on_seed_and_ids_not_on_length_or_row_order() -> None:
    rows = [judgment(f"p{one}", "correct", sample=two, n_tokens=two) for one in range(400) for two in range(4)]
    selected = set(ids(run(rows)[0]))
    assert set(ids(run(rows[::-1])[0])) == selected
    assert set(ids(run([row | {"n_tokens": 100 - row["n_tokens"]} for row in rows])[0])) == selected
    assert set(ids(run(rows, seed=1)[0])) != selected
    assert all(70 < count < 130 for count in Counter(sample for _, _, sample in selected).values())


def test_the_band_is_over_all_samples_of_the_pair_and_order() -> None:
    rows = samples("easy", "cccc") + samples("hard", "cxue") + samples("mid", "ccwt")
    selected, reasons = run(rows, min_right=0.5, max_right=0.75, keep_per_pair=None)
    assert {name for name, _, _ in ids(selected)} == {"mid"}
    assert reasons == {"too_easy": 4, "too_hard": 1, "truncated": 1, "unparsed": 1, "error": 1, "wrong": 1, "tie": 1}


def test_the_bounds_of_the_band_are_inside() -> None:
    assert run(samples("p", "cw"), min_right=0.5, max_right=0.5)[0].num_rows == 1


def test_hinted_samples_are_kept_but_do_not_count_in_the_band() -> None:
    rows = [*samples("p", "wwww"), judgment("p", "correct", sample=9, hinted=True)]
    assert ids(run(rows)[0]) == [("p", "ab", 9)]
    assert run(rows, min_right=0.1)[1] == {"wrong": 4, "too_hard": 1}


def test_balance_is_exact() -> None:
    rows = [judgment(f"a{one}", "correct") for one in range(30)]
    rows += [judgment(f"b{one}", "correct", verdict="B") for one in range(11)]
    selected, reasons = run(rows, balance=True)
    assert Counter(name[0] for name, _, _ in ids(selected)) == {"a": 11, "b": 11}
    assert reasons == {"balance": 19}
    assert run(rows[:30], balance=True)[0].num_rows == 0


def test_sides_need_both_in_one_pair_and_order() -> None:
    rows = samples("p", "cw") + samples("right", "cc") + samples("wrong", "ww") + samples("turned", "c")
    rows += samples("turned", "w", order="ba")
    selected, reasons = sides(rows)
    assert {name for name, _, _ in ids(selected)} == {"p"}
    assert reasons == {"no_wrong": 3, "no_right": 3}


@pytest.mark.parametrize(("unparsed", "kept"), [(False, 0), (True, 3)])
def test_unparsed_can_be_rejected_only_if_asked(unparsed: bool, kept: int) -> None:
    selected, reasons = sides(samples("p", "cubtxe"), unparsed)
    assert selected.num_rows == kept
    assert not {Status.TRUNCATED, Status.ERROR, Status.TIE} & set(selected.column("status").to_pylist())
    assert reasons["truncated"] == reasons["error"] == reasons["tie"] == 1


def test_sides_in_the_band() -> None:
    rows = samples("easy", "cccw") + samples("mid", "ccww")
    selected, reasons = sides(rows, max_right=0.5)
    assert {name for name, _, _ in ids(selected)} == {"mid"}
    assert reasons == {"too_easy": 4}


def test_sides_are_balanced_by_whole_pairs() -> None:
    rows = [row for one in range(9) for row in samples(f"a{one}", ("ccw", "wcc")[one % 2])]
    for row in samples("b", "cww"):
        rows.append(row | {"verdict": "B" if row["status"] == "correct" else "A"})
    selected, reasons = sides(rows, balance=True)
    assert Counter(name[0] for name, _, _ in ids(selected)) == {"a": 3, "b": 3}
    assert reasons == {"balance": 24}
    assert sides(rows[:27], balance=True)[0].num_rows == 0


def test_no_rows() -> None:
    assert run([], balance=True)[0].num_rows == 0
    assert sides([], balance=True)[0].num_rows == 0


def test_golden() -> None:
    pairs, completions = fixed_case()
    judged = judge(completions, pairs)
    tight = SelectConfig(min_right=0.25, max_right=0.75, balance=True)
    made = [
        *select.select(judged, tight, seed=4),
        *select.select(judged, SelectConfig(keep_per_pair=2), seed=5),
        *select.select_sides(judged, tight, seed=4, unparsed_rejected=True),
    ]
    check_golden("select", select.VERSION, [one.to_pylist() for one in made])
