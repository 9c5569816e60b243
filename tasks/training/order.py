"""Decide which rows an optimiser step sees: pure, by seed alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from storage.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from configs.run import TrainConfig


@dataclass(frozen=True)
class Batches:
    """Hold the sizes: `batch` rows an optimiser step, in `accumulation` parts of `micro` rows on each process.

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

    StepFailedError where the batch can't be shared equally among the processes.
    """
    batch = min(config.batch_size, rows) if processes == 1 else config.batch_size
    if batch % processes:
        raise StepFailedError(
            f"train.batch_size: {batch} can't be shared equally among {processes} processes; "
            f"give a multiple of {processes}"
        )
    share = batch // processes
    micro = max(part for part in range(1, min(config.per_device_batch, share) + 1) if share % part == 0)
    total = config.max_steps * batch if config.max_steps else max(1, round(config.epochs * rows))
    return Batches(total, batch, micro, share // micro)


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
