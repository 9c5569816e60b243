"""Read and write the ids of rows."""

from __future__ import annotations

import pytest

from storage.errors import DataError
from tasks.look.row_id import RowId, Sample, parse_id


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("p83c1", RowId("p83c1")),
        ("p83c1:ba", RowId("p83c1", "ba")),
        ("p83c1:ab:12", RowId("p83c1", "ab", (Sample(12, False),))),
        ("p83c1:ab:0h-3", RowId("p83c1", "ab", (Sample(0, True), Sample(3, False)))),
    ],
)
def test_row_ids(text: str, meant: RowId) -> None:
    assert parse_id(text) == meant
    assert str(meant) == text


@pytest.mark.parametrize(
    "text", ["", "x", "p83c1:", "p83c1:ac", "p83c1:ab:", "p83c1:ab:x", "p83c1:ab:1-", "p83:ab:1:2"]
)
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="is no row id: write PAIR"):
        parse_id(text)
