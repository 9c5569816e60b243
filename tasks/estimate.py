"""Hold what is assumed where nothing was measured, each with its range and where it comes from; ranges add up here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Range(NamedTuple):
    """Hold an estimate and the ends it probably lies between."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        """Give what is known."""
        return cls(value, value, value)

    def widened(self, share: float) -> Range:
        """Give at least so much room on either side, as a share of the value."""
        return Range(self.value, min(self.low, self.value * (1 - share)), max(self.high, self.value * (1 + share)))

    def times(self, other: Range | float) -> Range:
        """Multiply; the ends with the ends."""
        by = other if isinstance(other, Range) else Range.exactly(other)
        return Range(self.value * by.value, self.low * by.low, self.high * by.high)

    def over(self, rate: Range) -> Range:
        """Divide by a rate; the slowest gives the high end."""
        return Range(self.value / rate.value, self.low / rate.high, self.high / rate.low)

    def plus(self, other: Range) -> Range:
        """Add; ends with ends, since one wrong rate makes all steps late at once."""
        return Range(self.value + other.value, self.low + other.low, self.high + other.high)


def total(parts: Iterable[Range | None]) -> Range:
    """Add what is known; nothing is 0."""
    result = Range.exactly(0)
    for part in parts:
        if part is not None:
            result = result.plus(part)
    return result


class Assumed(NamedTuple):
    """Hold a stated default: its range and its source."""

    range: Range
    source: str


REFERENCE_GPU = 8.0e9  # parameters of the model that the GPU rates below are of; others are scaled by size
REFERENCE_CPU = 0.135e9  # … and the CPU rates

ASSUMED = {
    # tokens written a second, all requests together
    "generate gpu": Assumed(Range(8000, 3000, 16000), "assumed: 8k tokens/s of an 8B model on one H100, by size"),
    "generate cpu": Assumed(Range(89, 30, 180), "docs/benchmarks.md: 135M on two cores, by size"),
    "generate scripted": Assumed(Range(100_000, 20_000, 500_000), "assumed: the scripted engine"),
    "plain generate": Assumed(Range(0.17, 0.1, 0.3), "assumed: transformers writes at a sixth of vLLM's rate"),
    # reading a prompt's token costs this share of writing one
    "read gpu": Assumed(Range.exactly(0.1), "assumed: prompts are read in large batches"),
    "read cpu": Assumed(Range.exactly(0.19), "docs/benchmarks.md: 89 against 471 tokens/s"),
    "read scripted": Assumed(Range(0.0, 0.0, 0.0), "the scripted engine reads nothing"),
    # tokens trained a second
    "train gpu": Assumed(Range(8000, 2500, 12000), "assumed: 6 FLOPs a parameter and token, 40 % of an H100's 989 T"),
    "train cpu": Assumed(Range(300, 60, 400), "docs/benchmarks.md: LoRA on 135M, two cores"),
    "train scripted": Assumed(Range(1e6, 1e5, 1e7), "assumed: the scripted trainer"),
    # seconds
    "engine start gpu": Assumed(Range(90, 30, 400), "assumed: weights loaded, graphs captured"),
    "engine start cpu": Assumed(Range(15, 5, 70), "measured: 5 s eager, 60 s compiled, and imports"),
    "engine start scripted": Assumed(Range(0.1, 0, 1), "assumed: the scripted engine"),
    "trainer start": Assumed(Range(30, 5, 120), "assumed: imports, weights loaded and stored"),
    "small step": Assumed(Range(1, 0.05, 5), "assumed: a step without a model"),
    "a row": Assumed(Range(5e-6, 2e-6, 5e-5), "docs/benchmarks.md: a million rows in 2 to 5 s"),
    "a pair cut": Assumed(Range(2e-3, 2e-4, 6e-3), "assumed: reading, and tokenizing twice"),
    # lengths
    "length": Assumed(Range(0.3, 0.1, 1.0), "assumed share of sample.max_tokens"),
    "verdict": Assumed(Range(6.0, 4.0, 8.0), "assumed: tokens of `[[A]]` and the end of turn"),
    "characters": Assumed(Range(4.0, 3.0, 5.0), "assumed: characters a token"),
    # training rows a prompt that was asked
    "yield star-sft": Assumed(Range(0.6, 0.4, 0.85), "assumed: share of prompts with a right rationale"),
    "yield star-dpo": Assumed(Range(0.5, 0.2, 0.8), "assumed: share of prompts with a right and a wrong rationale"),
    "yield star-rationalizer": Assumed(Range(0.85, 0.6, 1.0), "assumed: share of hinted rationales that are right"),
    "broken": Assumed(Range(0.1, 0.01, 0.4), "assumed: share of completions that are truncated or without verdict"),
    "failed": Assumed(Range(0.3, 0.05, 0.6), "assumed: share of pairs without a right completion"),
    # bytes stored
    "bytes a token": Assumed(Range(3, 1.5, 6), "assumed: text as zstd, ids and numbers of its row"),
}

# What a split of the hub's data sets holds, where it can't be read yet: pairs by its card, and assumed characters of
# prompt and both responses.
HUB_SIZES = {
    ("HuggingFaceH4/ultrafeedback_binarized", "train_prefs"): (61_135, 3400),
    ("openbmb/UltraInteract_pair", "train"): (219_522, 3800),
    ("allenai/reward-bench", "filtered"): (2985, 2600),
}

LEAST_TOKENS, LEAST_SECONDS = 0.1, 0.25  # least room for a measured length, and for a measured rate


@dataclass(frozen=True)
class Estimate:
    """Hold what a step will probably take; a part is None where it isn't known or the step has none.

    rows: written. prompt_tokens: read, once each. tokens: written by the engine, or trained on. seconds: of wall time.
    gpus: held for that time. bytes: stored. source: where rates and lengths come from.
    """

    rows: Range | None = None
    prompt_tokens: Range | None = None
    tokens: Range | None = None
    seconds: Range | None = None
    gpus: int = 0
    bytes: Range | None = None
    source: str = ""

    @property
    def gpu_hours(self) -> Range | None:
        """Give GPUs × wall time."""
        return self.seconds.times(self.gpus / 3600) if self.seconds else None
