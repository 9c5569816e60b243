"""Describe a source before it is used: counts, lengths, balance, what trivial judges would score, a few pairs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from storage.errors import DataError, MissingDependencyError
from tasks.judge.prompts import conversation
from tasks.judge.statistics import mean_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tasks.data.reading import Reading

SHARES = {"median": 0.5, "p95": 0.95}
EXAMPLE_CHARACTERS = 400
SUBSETS = 30  # of the most pairs


@dataclass(frozen=True)
class Baseline:
    """Hold what a judge without judgment scores: share right, 95 % interval clustered by group, pairs, groups.

    A pair that it can't tell (as long, as many lines) counts half.
    """

    judge: str
    accuracy: float
    low: float
    high: float
    n: int
    clusters: int


@dataclass(frozen=True)
class Profile:
    """Hold what `starwheel data inspect` shows.

    dropped: reason -> rows; why: reason -> where it was met first. lengths: part -> mean, median, p95, max, in
    characters or tokens. gold_a: pairs whose better response is stored as response_a.
    """

    layout: str
    rows: int
    kept: int
    dropped: Mapping[str, int]
    why: Mapping[str, str]
    groups: int
    multi_turn: int
    subsets: Mapping[str, int]
    gold_a: int
    unit: str
    lengths: Mapping[str, Mapping[str, float]]
    baselines: Sequence[Baseline]
    examples: Sequence[Mapping[str, str]]

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return asdict(self)


def make_profile(reading: Reading, *, count: Callable[[str], int] = len, unit: str = "characters") -> Profile:
    """Describe a reading; `count` measures a text in `unit`."""
    counts = reading.counts
    frame = _sides(reading)
    dropped = counts["dropped"]
    assert isinstance(dropped, dict)
    return Profile(
        layout=reading.layout,
        rows=reading.ledger.num_rows,
        kept=frame.height,
        dropped=dropped,
        why=_first_details(reading),
        groups=frame["group"].n_unique(),
        multi_turn=int((frame["turns"] > 1).sum()),
        subsets=_subsets(frame),
        gold_a=int((frame["gold"] == "A").sum()),
        unit=unit,
        lengths={part: _lengths(frame[part], count) for part in ("prompt", "better", "worse")},
        baselines=_baselines(frame),
        examples=_examples(frame),
    )


def token_counter(tokenizer: str) -> Callable[[str], int]:
    """Give what counts the tokens of a text: by a folder with tokenizer.json, or that file; without special tokens."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(f"{tokenizer}: counting tokens needs `pip install tokenizers`") from error
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{file} is no tokenizer: name a folder with tokenizer.json, or that file.") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _sides(reading: Reading) -> pl.DataFrame:
    """Give the pairs with the prompt as the judge reads it, its number of turns, the better and the worse response."""
    prompts = [conversation(prompt) for prompt in reading.pairs["prompt"].to_pylist()]
    is_a = pl.col("gold") == "A"
    return pl.DataFrame(reading.pairs).with_columns(
        turns=pl.col("prompt").list.len(),
        prompt=pl.Series(prompts, dtype=pl.String),
        better=pl.when(is_a).then("response_a").otherwise("response_b"),
        worse=pl.when(is_a).then("response_b").otherwise("response_a"),
    )


def _first_details(reading: Reading) -> dict[str, str]:
    first = pl.DataFrame(reading.dropped).sort("row").group_by("reason", maintain_order=True).first().sort("reason")
    rows = first.select("reason", "row", pl.col("detail").fill_null("")).rows()
    return {reason: f"row {row}: {detail}" for reason, row, detail in rows}


def _subsets(frame: pl.DataFrame) -> dict[str, int]:
    counts = frame.group_by("subset").len().sort("len", "subset", descending=[True, False]).head(SUBSETS)
    return dict(counts.iter_rows())


def _lengths(texts: pl.Series, count: Callable[[str], int]) -> dict[str, float]:
    lengths = sorted(texts.str.len_chars() if count is len else (count(text) for text in texts))
    if not lengths:
        return {}
    shares = {name: lengths[round(share * (len(lengths) - 1))] for name, share in SHARES.items()}
    return {"mean": round(sum(lengths) / len(lengths), 1), **shares, "max": lengths[-1]}


def _baselines(frame: pl.DataFrame) -> list[Baseline]:
    """Score judges that read nothing but the place, the length or the lines of the responses."""
    better, worse = pl.col("better").str, pl.col("worse").str
    lines = [side.count_matches("\n", literal=True) for side in (better, worse)]
    scores = {
        "always A": (pl.col("gold") == "A").cast(pl.Float64),
        "longer answer": _greater(better.len_chars(), worse.len_chars()),
        "shorter answer": _greater(worse.len_chars(), better.len_chars()),
        "more lines": _greater(*lines),
    }
    groups = frame["group"].to_list()
    found = []
    for judge, score in scores.items():
        mean, low, high, n, clusters = mean_interval(frame.select(score).to_series().to_numpy(), groups)
        if n:
            found.append(Baseline(judge, mean or 0.0, low or 0.0, high or 0.0, n, clusters))
    return found


def _greater(better: pl.Expr, worse: pl.Expr) -> pl.Expr:
    return pl.when(better > worse).then(1.0).when(better < worse).then(0.0).otherwise(0.5)


def _examples(frame: pl.DataFrame) -> list[dict[str, str]]:
    """Give the first pairs, long texts cut."""
    cut = [
        pl.when(pl.col(name).str.len_chars() > EXAMPLE_CHARACTERS)
        .then(pl.col(name).str.head(EXAMPLE_CHARACTERS) + pl.lit(" …"))
        .otherwise(name)
        .alias(name)
        for name in ("prompt", "better", "worse")
    ]
    return frame.head(3).select("pair_id", *cut).to_dicts()
