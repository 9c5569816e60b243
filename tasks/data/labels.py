"""Read who won: a letter, a number or a name that means one of the two responses, one column each, or several votes."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from tasks.data.messages import field, kind, text
from tasks.data.reasons import BadRow, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TIES = frozenset({"tie", "tied", "draw", "equal", "same", "both", "neither", "bothbad", "tie (bothbad)"})
NUMBERED = {("1", "2"): {"1": "A", "2": "B", "0": "tie", "1.5": "tie"}, ("0", "1"): {"0": "A", "1": "B"}}


def winner(record: Mapping[str, object], column: str, responses: tuple[str, str]) -> str:
    """Give A or B from one column; raise BadRow for a tie and for what means neither.

    A and B, `model_a` and `model_b` and the names of the response columns are known in either case; numbers only where
    those names end in numbers, and count as they do: 1, 2 and 0 for a tie, or 0 and 1.
    """
    verdict = _vote(field(record, column), column, responses)
    if verdict == "tie":
        raise BadRow(Reason.TIE, f"{column} {ascii(record[column])[:60]}")
    return verdict


def one_hot(record: Mapping[str, object], columns: Sequence[str]) -> str:
    """Give A or B from a column each for A, B and a tie, of which one must hold 1 and the others 0."""
    marks = [_number(field(record, column), column) for column in columns]
    if sorted(marks) != [0.0, 0.0, 1.0]:
        raise BadRow(Reason.BAD_LABEL, f"{', '.join(columns)} are {', '.join(f'{mark:g}' for mark in marks)}")
    if marks[2]:
        raise BadRow(Reason.TIE, columns[2])
    return "A" if marks[0] else "B"


def score(value: object) -> float | None:
    """Give a score as a number, also one written as text (CSV); None where it is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def majority(record: Mapping[str, object], columns: Sequence[str], responses: tuple[str, str]) -> str:
    """Give what more than half of the annotators say; who says nothing doesn't count."""
    given = [column for column in columns if _says(record.get(column))]
    if not given:
        raise BadRow(Reason.MISSING_FIELD, ", ".join(columns))
    votes = Counter(_vote(field(record, column), column, responses) for column in given)
    verdict, most = votes.most_common(1)[0]
    if verdict == "tie" or 2 * most <= len(given):
        counted = ", ".join(f"{name} {votes[name]}" for name in ("A", "B", "tie"))
        raise BadRow(Reason.TIE, f"no majority for a response: {counted}")
    return verdict


def _says(value: object) -> bool:
    return not (value is None or value == "" or (isinstance(value, float) and math.isnan(value)))


def _vote(value: object, name: str, responses: tuple[str, str]) -> str:
    """Give A, B or `tie`."""
    ends = (responses[0][-1], responses[1][-1])
    numbers = NUMBERED.get(ends, {})
    if isinstance(value, bool) or (isinstance(value, int | float) and not numbers):
        raise BadRow(Reason.BAD_TYPE, f"{name} is {kind(value)}; A, B or tie is wanted")
    if isinstance(value, int | float):
        word = f"{value:g}" if isinstance(value, float) else str(value)
    else:
        word = text(value, name).strip().casefold()
    known = {"a": "A", "b": "B", "model_a": "A", "model_b": "B", **numbers}
    known |= {column.casefold(): letter for column, letter in zip(responses, "AB", strict=True)}
    known |= {f"model_{end}": letter for end, letter in zip(ends, "AB", strict=True)}
    known |= {f"{number}.0": letter for number, letter in numbers.items()}  # as written by pandas
    verdict = "tie" if word in TIES else known.get(word)
    if verdict is None:
        wanted = "A, B or tie" + (f", or {' and '.join(ends)}," if numbers else "")
        raise BadRow(Reason.BAD_LABEL, f"{name} {ascii(word)[:60]}; {wanted} is wanted")
    return verdict


def _number(value: object, name: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else float(text(value, name))
    except (ValueError, OverflowError):
        raise BadRow(Reason.BAD_LABEL, f"{name} {ascii(value)[:60]}; 0 or 1 is wanted") from None
    if not math.isfinite(number):
        raise BadRow(Reason.BAD_LABEL, f"{name} {number}; 0 or 1 is wanted")
    return number
