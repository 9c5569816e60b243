"""Draw lots that are the same on every machine and library version: SHA-256 of the seed and the ids."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bits = NDArray[np.uint64]


def hash_bits(seed: int, words: Sequence[str], *, purpose: str) -> Bits:
    """Return 64 bits a word: the first eight bytes of SHA-256 over seed, purpose and word.

    Another purpose gives independent lots, so one draw never leans on another.
    """
    start = hashlib.sha256(f"{seed}\n{purpose}\n".encode())
    digests = bytearray()
    for word in words:
        one = start.copy()
        one.update(word.encode())
        digests += one.digest()[:8]
    return np.frombuffer(bytes(digests), dtype=">u8").astype(np.uint64)


def lots(rows: pl.DataFrame, seed: int, *, purpose: str) -> pl.Series:
    """Return a uint64 a judgment, from the five columns of its id; the row order leaves no trace.

    SHA-256 is taken once a distinct pair and checkpoint; the rest is mixed in whole columns.
    """
    bits = _column_bits(rows["pair_id"], seed, purpose) ^ _mix(_column_bits(rows["checkpoint"], seed, purpose))
    sample, swapped, hinted = (
        one.cast(pl.UInt64) for one in (pl.col("sample"), pl.col("order") == "ba", pl.col("hinted"))
    )
    small = rows.select(sample * 4 + swapped * 2 + hinted).to_series()
    return pl.Series("lot", _mix(bits ^ _mix(small.to_numpy())), dtype=pl.UInt64)


def group_lots(rows: pl.DataFrame, seed: int, *, purpose: str) -> pl.Series:
    """Return a uint64 a row from pair, checkpoint and order alone: the same for all samples of a prompt."""
    bits = _column_bits(rows["pair_id"], seed, purpose) ^ _mix(_column_bits(rows["checkpoint"], seed, purpose))
    swapped = (rows["order"] == "ba").cast(pl.UInt64).to_numpy()
    return pl.Series("lot", _mix(bits ^ _mix(swapped)), dtype=pl.UInt64)


def _column_bits(column: pl.Series, seed: int, purpose: str) -> Bits:
    words = column.unique()
    bits = pl.Series("bits", hash_bits(seed, words.to_list(), purpose=purpose), dtype=pl.UInt64)
    table = words.to_frame("word").with_columns(bits)
    return column.to_frame("word").join(table, on="word", how="left", maintain_order="left")["bits"].to_numpy()


def _mix(bits: Bits) -> Bits:
    """Scramble 64 bits one to one: the finaliser of SplitMix64 (Steele et al. 2014, https://doi.org/10.1145/2660193.2660195)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Bits = bits ^ (bits >> np.uint64(31))
    return mixed
