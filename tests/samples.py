"""Make small tables of declared kinds for the tests of the store."""

from __future__ import annotations

import pyarrow as pa

from storage.schema import SCHEMAS


def judgments(rows: int, *, start: int = 0, verdict: str | None = "A") -> pa.Table:
    """Make judgments of pairs `p<start>` … whose optional columns are null where `verdict` is None."""
    ids = range(start, start + rows)
    columns = {
        "pair_id": [f"p{number:06d}" for number in ids],
        "checkpoint": ["c" * 64] * rows,
        "order": ["ab" if number % 2 else "ba" for number in ids],
        "sample": [number % 4 for number in ids],
        "hinted": [number % 3 == 0 for number in ids],
        "verdict": [verdict] * rows,
        "status": ["correct" if verdict else "unparsed"] * rows,
        "rationale_end": [number if verdict else None for number in ids],
        "n_tokens": [number * 7 % 200 for number in ids],
        "prob_gold": [number / 1000 if verdict else None for number in ids],
    }
    return pa.table(columns, schema=SCHEMAS["judgments"])


def sft(rows: int) -> pa.Table:
    """Make training rows, whose columns of messages are lists of structs."""
    ids = range(rows)
    columns = {
        "pair_id": [f"p{number}" for number in ids],
        "checkpoint": ["c" * 64] * rows,
        "order": ["ab"] * rows,
        "sample": [0] * rows,
        "hinted": [False] * rows,
        "prompt": [[{"role": "user", "content": f"judge {number} " * (number % 5)}] * (number % 3) for number in ids],
        "completion": [[{"role": "assistant", "content": f"[[{'AB'[number % 2]}]]"}] for number in ids],
    }
    return pa.table(columns, schema=SCHEMAS["sft"])
