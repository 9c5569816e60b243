"""Print rows of artifacts, judgments in full, lineage and comparisons; stored text stays text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flows.terminal import excerpt, plain, print_side_by_side, print_table, print_text
from storage.schema import SCHEMAS, Order
from tasks.judge.prompts import conversation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.look.compare import Comparison
    from tasks.look.rows import Page
    from tasks.look.trace import Trace

_PAIR_DIGITS = 13  # of a pair's id in a table; ids may be shortened wherever they are given
_WRITTEN = ("verdict", "status", "prob_gold", "n_tokens", "text")
# What a table shows of a kind behind the id; other kinds show their own columns.
_COLUMNS = {
    "judgments": ("subset", "judge", *_WRITTEN),
    "completions": ("subset", "judge", *_WRITTEN, "finish_reason", "error"),
    "selected": ("subset", "judge", *_WRITTEN),
    "dropped": ("subset", "judge", "reason", *_WRITTEN),
    "choices": ("subset", "judge", "gold", "prob_a", "error"),
    "pairs": ("source", "subset", "gold", "prompt", "response_a", "response_b"),
    "splits": ("source", "row", "split", "reason", "detail", "subset"),
    "sft": ("subset", "judge", "completion"),
    "dpo": ("subset", "judge", "chosen", "rejected"),
    "pair_scores": ("suite", "subset", "forced_choice", "free_text", "consistent"),
}
_FACTS = {"gold": "gold, as stored", "verdict": "verdict, as shown", "n_tokens": "tokens", "prob_gold": "P(gold)"}
_TEXTS = ("prompt", "response_a", "response_b", "text", "completion", "chosen", "rejected")


def print_rows(page: Page, kind: str, *, title: str, offset: int) -> None:
    """Print a page as a table, texts cut to a line."""
    named = bool(page.rows) and "id" in page.rows[0]
    columns = _COLUMNS.get(kind) or tuple(name for name in SCHEMAS[kind].names if name != "pair_id" or not named)
    several = len({_step(row) for row in page.rows}) > 1
    names = [*(["id"] if named else []), *(["step"] if several else []), *columns]
    print_table(names, [[_cell(row, name) for name in names] for row in page.rows], title=title)
    _print_place(page, offset)


def _print_place(page: Page, offset: int) -> None:
    if page.rows:
        print(f"rows {offset + 1}–{offset + len(page.rows)} of {page.total}")
    else:
        print(f"no row of {page.total} is left behind --offset {offset}" if page.total else "no row")


def _step(row: Mapping[str, Any]) -> str:
    return f"{row['step']} {row['label']}".strip()


def _cell(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    if name == "id":
        return _short(row["id"])
    if name == "step":
        return _step(row)
    if isinstance(value, list):
        return excerpt(_text(value)) if value and isinstance(value[0], dict) else f"{len(value)} numbers"
    if name == "checkpoint":
        return str(value)[:12]
    return excerpt(value) if isinstance(value, str) else value


def _short(row_id: str) -> str:
    pair, _, rest = row_id.partition(":")
    return f"{pair[:_PAIR_DIGITS]}:{rest}" if rest else pair[:_PAIR_DIGITS]


def _text(value: Any) -> str:
    """Give a text or the messages of a conversation as one text; a turn of the assistant alone is its content."""
    if not isinstance(value, list):
        return str(value)
    return str(value[0]["content"]) if len(value) == 1 else conversation(value) if value else ""


def print_full(page: Page, *, title: str, offset: int) -> None:
    """Print each row of a page with its whole texts: prompt, both responses as they were shown, what was written."""
    print(plain(title))
    for row in page.rows:
        _print_row(row)
    _print_place(page, offset)


def _print_row(row: Mapping[str, Any]) -> None:
    hidden = {*_TEXTS, "id", "iteration", "step", "label", "pair_id", "checkpoint", "rationale_end", "group"}
    facts = [
        f"{_FACTS.get(name, name.replace('_', ' '))} {plain(value)}"
        for name, value in row.items()
        if name not in hidden and value is not None and not isinstance(value, list)
    ]
    print(f"\n{plain(row.get('id', ''))}  iteration {row['iteration']} · {plain(_step(row))}")
    print(" · ".join(facts))
    if "prompt" in row:
        print_text("prompt", _text(row["prompt"]))
    if row.get("response_a") is not None:
        print_side_by_side(*_responses(row))
    for name, heading in (("text", "what the judge wrote"), ("completion", "completion")):
        if row.get(name) is not None:
            print_text(heading, _text(row[name]))
    if "chosen" in row:
        print_side_by_side(("chosen", _text(row["chosen"])), ("rejected", _text(row["rejected"])))


def _responses(row: Mapping[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Give the responses as they were shown, each with its letter there, and which is better."""
    stored = ["a", "b"] if row.get("order", Order.AB) == Order.AB else ["b", "a"]
    first, second = (
        (
            f"{letter}{'' if one == letter.lower() else f', stored as {one.upper()}'}"
            f"{' (better)' if row['gold'] == one.upper() else ''}",
            str(row[f"response_{one}"]),
        )
        for letter, one in zip("AB", stored, strict=True)
    )
    return first, second


def print_trace(found: Trace) -> None:
    """Print where a row comes from and what it trained."""
    print(f"{plain(found.id)} in {plain(found.run)}")
    if found.pair is not None:
        facts = ("gold", "source", "subset", "group")
        print(" · ".join(f"{name} {plain(found.pair[name])}" for name in facts))
        print_text("prompt", _text(found.pair["prompt"]))
        print_side_by_side(*_responses({**found.pair, "order": Order.AB}))
    columns = ("source", "address", "row", "split", "reason", "detail")
    print_table(columns, [[one[name] for name in columns] for one in found.sources], title="source row and split")
    if found.judgments:
        names = ("", "iteration", "step", "judge", "made by", "order", "sample", *_WRITTEN[:3], "outcome", "text")
        print_table(names, [_judgment(one) for one in found.judgments], title="judgments (→ named by the id)")
    if found.rows:
        rows = [(one["iteration"], one["artifact"], one["judge"], _made_of(one)) for one in found.rows]
        print_table(("iteration", "rows of", "judge", "made of"), rows, title="training rows")
    for one in found.checkpoints:
        print(f"checkpoint {one['checkpoint']}: {one['how']} (step {one['key'][:12]}, model {one['model'][:12]})")
    if not found.checkpoints:
        print("no checkpoint was trained on it")


def _judgment(one: Mapping[str, Any]) -> tuple[Any, ...]:
    hinted = " hinted" if one.get("hinted") else ""
    sample = f"{one['sample']}{hinted}" if one.get("sample") is not None else None
    text = excerpt(one["text"]) if one.get("text") is not None else None
    maker = one["made_by"][:12] if one["made_by"] else None
    said = [one.get(name) for name in _WRITTEN[:3]]
    mark = "→" if one["named"] else ""
    return (mark, one["iteration"], _step(one), one["judge"], maker, one["order"], sample, *said, one["outcome"], text)


def _made_of(row: Mapping[str, Any]) -> str:
    if row["artifact"] == "dpo":
        return f"{row['order']}: sample {row['chosen_sample']} over {row['rejected_sample']}"
    return f"{row['order']}: sample {row['sample']}"


def print_comparison(found: Comparison) -> None:
    """Print in what two judges differ."""
    print(f"{plain(found.before)} → {plain(found.now)}")
    for line in found.settings or ("the same settings",):
        print(f"  {plain(line)}")
    if found.yields:
        print_table(*_yields(found), title="yields: before → now")
    columns = ("suite", "metric", "before", "now", "difference in points", "p", "pairs", "groups")
    metrics = [
        (
            one.suite,
            one.metric,
            _percent(one.before),
            _percent(one.now),
            f"{100 * one.difference.value:+.1f} [{100 * one.difference.low:+.1f}, {100 * one.difference.high:+.1f}]",
            f"{one.difference.p:.2g}",
            one.difference.n,
            one.difference.clusters,
        )
        for one in found.metrics
    ]
    print_table(columns, metrics, title="% on the pairs of both, 95 % intervals, paired tests clustered by prompt")
    for suite, counts in found.flipped.items():
        print(f"{plain(suite)}: {counts['gained']} pairs gained, {counts['lost']} lost")
    if found.flips:
        names = ("suite", "subset", "id", "before", "now", "change", "prompt")
        shown = [[_cell({**one, "id": one["pair_id"]}, name) for name in names] for one in found.flips]
        print_table(names, shown, title="flipped pairs, the greatest changes first; `starwheel trace` has all of one")


def _percent(one: Any) -> str:
    return f"{100 * one.value:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def _yields(found: Comparison) -> tuple[Sequence[str], list[list[str]]]:
    counted = ("asked", "with_rows", "completions", "selected", "rows", "hinted")
    table = []
    for sides in found.yields:
        iterations = dict.fromkeys(str(one.iteration) for one in sides if one)
        cells = [" → ".join("–" if one is None else str(getattr(one, name)) for one in sides) for name in counted]
        table.append([" → ".join(iterations), *cells])
    return ("iteration", "prompts", "with a row", "completions", "selected", "training rows", "hinted"), table
