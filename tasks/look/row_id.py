"""Spell which rows are meant: `PAIR`, `PAIR:ORDER`, `PAIR:ORDER:SAMPLE` or, of a DPO row, `PAIR:ORDER:CHOSEN-REJECTED`.

A sample that was shown the answer (hinted) ends with `h`: `p83c1…:ab:0h`. PAIR may be the beginning of a pair's id.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from storage.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_ID = re.compile(r"(p[0-9a-f]{0,24})(?::(ab|ba)(?::([0-9]{1,9}h?)(?:-([0-9]{1,9}h?))?)?)?")


class Sample(NamedTuple):
    """Name a draw."""

    sample: int
    hinted: bool

    def __str__(self) -> str:
        return f"{self.sample}{'h' if self.hinted else ''}"


class RowId(NamedTuple):
    """Name rows by what they share: a pair, an order, a sample, or the two samples of a DPO row."""

    pair: str
    order: str | None = None
    samples: tuple[Sample, ...] = ()

    def __str__(self) -> str:
        parts = (self.pair, self.order, "-".join(map(str, self.samples)))
        return ":".join(part for part in parts if part)


def parse_id(text: str) -> RowId:
    """Read an id, or raise DataError that says how one is written."""
    found = _ID.fullmatch(text)
    if not found:
        raise DataError(
            f"{text[:80]!r} is no row id: write PAIR, PAIR:ORDER, PAIR:ORDER:SAMPLE or PAIR:ORDER:CHOSEN-REJECTED as "
            "`starwheel rows` prints them, e.g. p83c1:ab:0"
        )
    pair, order, *samples = found.groups()
    return RowId(str(pair), order, tuple(Sample(int(one.rstrip("h")), one.endswith("h")) for one in samples if one))


def row_id(row: Mapping[str, Any]) -> RowId | None:
    """Name a row of an artifact; None where it is of no pair."""
    if row.get("pair_id") is None:
        return None
    sides = [side for side in ("", "chosen_", "rejected_") if f"{side}sample" in row]
    samples = tuple(Sample(row[f"{side}sample"], row[f"{side}hinted"]) for side in sides)
    return RowId(row["pair_id"], row.get("order"), samples)
