"""Decide which rows an optimiser step sees: pure, by seed alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from storage.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from configs.run import TrainConfig


@dataclass(frozen=True)
class Batches:
    """Hold the sizes: `batch` rows an optimiser step, in `accumulation` parts of up to `micro` rows on each process.

    The last step has fewer rows where `total` (rows seen over all epochs) isn't a multiple of `batch`.
    """

    total: int
    batch: int
    micro: int
    accumulation: int

    @property
    def steps(self) -> int:
        """Count the optimiser steps."""
        return math.ceil(self.total / self.batch)


def cut_batches(config: TrainConfig, rows: int, *, processes: int = 1) -> Batches:
    """Fit the effective batch: never more than the rows; `micro` is the largest part within per_device_batch.

    However many processes share a batch, its rows are the same. StepFailedError where the setting can't be shared.
    """
    if config.batch_size % processes:
        raise StepFailedError(
            f"train.batch_size: {config.batch_size} can't be shared equally among {processes} processes; "
            f"give a multiple of {processes}"
        )
    batch = min(config.batch_size, rows)
    share = math.ceil(batch / processes)
    micro = max(part for part in range(1, min(config.per_device_batch, share) + 1) if share % part == 0)
    total = config.max_steps * batch if config.max_steps else max(1, round(config.epochs * rows))
    return Batches(total, batch, micro, share // micro)


def deal(batches: Batches, step: int, *, processes: int) -> list[list[list[int]]]:
    """Deal the rows of optimiser step `step` (from 0) to processes: process -> part -> positions in the order.

    Every process gets as many parts, of at most `micro` rows; where rows are few some parts are empty. Parts that are
    trained at one time are next to each other in the order, so of like length.
    """
    first = step * batches.batch
    positions = np.arange(first, min(first + batches.batch, batches.total))
    each = min(math.ceil(len(positions) / (processes * batches.micro)), batches.accumulation)
    parts = [part.tolist() for part in np.array_split(positions, each * processes)]
    return [parts[process::processes] for process in range(processes)]


def merge_seen(dealt: Sequence[Sequence[Sequence[int]]], seen: Sequence[Sequence[int]]) -> list[int]:
    """Bring the rows that processes saw in a step, each in its own order, into the order of their positions.

    Rows that weren't dealt, or weren't seen, make it a list of another length.
    """
    mine = [[position for part in parts for position in part] for parts in dealt]
    if [len(positions) for positions in mine] != [len(rows) for rows in seen]:
        return [row for rows in seen for row in rows]
    pairs = [pair for positions, rows in zip(mine, seen, strict=True) for pair in zip(positions, rows, strict=True)]
    return [row for _, row in sorted(pairs)]


def row_order(lengths: NDArray[np.int64], batches: Batches, *, seed: int) -> NDArray[np.int64]:
    """Give the row numbers in the order they are trained, one permutation after the other, cut at `batches.total`.

    Epochs follow each other without a gap, so a step may span two of them. Which rows share a step depends on the seed
    alone; inside a step they stand by length, longest first, so that little is padded.
    """
    rows = len(lengths)
    epochs = math.ceil(batches.total / rows)
    drawn = [np.random.default_rng([seed, epoch]).permutation(rows) for epoch in range(epochs)]
    order = np.concatenate(drawn)[: batches.total]
    step = np.arange(len(order)) // batches.batch
    return np.asarray(order[np.lexsort((-lengths[order], step))], dtype=np.int64)


def digest_rows(rows: Iterable[int]) -> str:
    """Digest row numbers in order: SHA-256 (hex) of them as little-endian 64-bit integers."""
    return hashlib.sha256(np.fromiter(rows, dtype="<i8").tobytes()).hexdigest()
