"""Tell a source's layout from its columns: which hold the prompt, the two responses and who won."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING

from storage.errors import DataError
from tasks.data import labels
from tasks.data.messages import field, is_transcript, optional, text, transcript, turns
from tasks.data.reasons import BadRow, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tasks.data.messages import Messages


class Layout(StrEnum):
    """Name how a source holds its pairs: the values of `data.sources.N.format`."""

    CHOSEN = "chosen"  # prompt, chosen, rejected
    TRANSCRIPT = "transcript"  # chosen and rejected are whole conversations in one text (hh-rlhf)
    SHAREGPT = "sharegpt"  # conversations, chosen, rejected
    TRAJECTORY = "trajectory"  # trajectory, chosen, rejected, grouped by parent_id (UltraInteract)
    LABELLED = "labelled"  # two responses and a column that says which is better
    ONE_HOT = "one-hot"  # two responses and winner_model_a, winner_model_b, winner_tie
    ANNOTATORS = "annotators"  # two responses and a column a voter: annotator1, annotator2, …


PROMPTS = ("prompt", "question", "instruction", "query", "input")
CONVERSATIONS = {Layout.SHAREGPT: ("conversations", "conversation"), Layout.TRAJECTORY: ("trajectory",)}
CHOSEN = ("chosen", "rejected")
STEMS = ("response", "answer", "output", "completion", "conversation")
ENDS = (("_a", "_b"), ("_1", "_2"), ("1", "2"), ("_0", "_1"))
RESPONSES = tuple((stem + first, stem + second) for ends, stem in product(ENDS, STEMS) for first, second in [ends])
LABELS = ("label", "winner", "preference", "better_response_id")
ONE_HOT = ("winner_model_a", "winner_model_b", "winner_tie")
SCORES = ("score_chosen", "score_rejected")
TREE = "parent_id"
ANNOTATOR = re.compile(r"annotator_?[0-9]+")
OWN = ("group", "source", "subset", "id")  # what a pair may have beside its texts
UNPAIRED = ("completion", "response", "answer", "output", "text", "messages")
MARKS = ("label", "score", "rating", "reward", "correct", "is_correct", "is_safe")
KNOWN = {
    *PROMPTS,
    *(name for names in CONVERSATIONS.values() for name in names),
    *CHOSEN,
    *(name for pair in RESPONSES for name in pair),
    *LABELS,
    *ONE_HOT,
    *SCORES,
    TREE,
    *OWN,
}


@dataclass(frozen=True)
class Shape:
    """Say in which columns a layout has its parts.

    prompt: none where the responses begin with it. labels: none where the first response is the better one. called:
    the response columns by the names that a label may use, where the source calls them otherwise.
    """

    layout: Layout
    prompt: tuple[str, ...]
    responses: tuple[str, str] = CHOSEN
    labels: tuple[str, ...] = ()
    called: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.layout}: {', '.join(self.columns)}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Give all of them."""
        return (*self.prompt, *self.responses, *self.labels)

    def gold(self, record: Mapping[str, object]) -> str:
        """Give A where the first response is the better one, else B; raise BadRow for a tie."""
        if self.layout is Layout.ONE_HOT:
            return labels.one_hot(record, self.labels)
        if self.layout is Layout.ANNOTATORS:
            return labels.majority(record, self.labels, self.called or self.responses)
        if self.labels:
            return labels.winner(record, self.labels[0], self.called or self.responses)
        scores = [labels.score(record.get(name)) for name in SCORES]
        if scores[0] is not None and scores[0] == scores[1]:
            raise BadRow(Reason.TIE, f"{' and '.join(SCORES)} are both {record[SCORES[0]]!a}")
        return "A"

    def sides(self, record: Mapping[str, object]) -> tuple[Messages | None, Messages, Messages]:
        """Give the prompt (None where there is no column of it, or no value) and the two responses, as messages."""
        first, second = self.responses
        if self.layout is Layout.TRANSCRIPT:
            return None, transcript(field(record, first), first), transcript(field(record, second), second)
        asked = _texts(record.get(self.prompt[0])) if self.layout is Layout.ONE_HOT else None
        if asked is not None and _texts(record.get(first)) is not None:
            return None, _dialogue(asked, record, first), _dialogue(asked, record, second)
        one, two = (turns(field(record, name), name, "assistant") for name in (first, second))
        return self._prompt(record), one, two

    @property
    def tree(self) -> str | None:
        """Name the column that the layout itself groups by: all rows of a tree answer the same instruction."""
        return TREE if self.layout is Layout.TRAJECTORY else None

    def _prompt(self, record: Mapping[str, object]) -> Messages | None:
        if not self.prompt or record.get(self.prompt[0]) is None:
            return None
        name, *more = self.prompt
        asked = turns(field(record, name), name, "user")
        added = [optional(record, column) for column in more]
        if any(added) and len(asked) == 1:
            asked = ((asked[0][0], "\n\n".join([asked[0][1], *filter(None, added)])),)
        return asked


def _texts(value: object) -> list[object] | None:
    """Read a list, or the JSON of one, of what was said in each turn; None for a plain text."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) and not any(isinstance(said, dict) for said in value) else None


def _dialogue(asked: Sequence[object], record: Mapping[str, object], name: str) -> Messages:
    """Put the prompts and one side's answers, a list each, together."""
    answers = _texts(field(record, name))
    if answers is None or len(answers) != len(asked):
        raise BadRow(Reason.BAD_TYPE, f"{name} has not one answer for each of the {len(asked)} prompts")
    said = [text(one, name) for both in zip(asked, answers, strict=True) for one in both]
    return tuple(zip(["user", "assistant"] * len(asked), said, strict=True))


def detect(
    columns: Sequence[str], records: Sequence[Mapping[str, object]], *, where: str, wanted: Layout | None = None
) -> Shape:
    """Choose the layout that more of the first rows fill, or the wanted one; raise DataError where none fits.

    Columns that fit two layouts equally are refused.
    """
    shapes = [shape for shape in _shapes(columns, records, wanted) if wanted is None or shape.layout is wanted]
    if not shapes:
        raise _no_layout(columns, where, wanted)
    fits = [_fit(shape, records) for shape in shapes]
    best = shapes[fits.index(max(fits))]
    equal = [shape for shape, fit in zip(shapes, fits, strict=True) if fit == max(fits)]
    rivals = [one for one in equal if one.responses != best.responses or _other_label(one, best)]
    if rivals:
        both = " and ".join(", ".join((*shape.responses, *shape.labels)) for shape in (best, rivals[0]))
        raise DataError(
            f"{where} has both {both}: say which by `format` or `columns`, or remove the columns of one of them."
        )
    return best


def _other_label(one: Shape, best: Shape) -> bool:
    return one.layout is best.layout is Layout.LABELLED and one.labels != best.labels


def _shapes(columns: Sequence[str], records: Sequence[Mapping[str, object]], wanted: Layout | None) -> Iterable[Shape]:
    """Give the layouts that the columns allow, the more special ones first."""
    prompt = _prompt_columns(columns)
    if set(CHOSEN) <= set(columns):
        told = [record for record in records if record.get(CHOSEN[0]) is not None]
        if told and 2 * sum(all(is_transcript(record.get(name)) for name in CHOSEN) for record in told) > len(told):
            yield Shape(Layout.TRANSCRIPT, ())
        for layout, names in CONVERSATIONS.items():
            if not prompt or layout in (Layout.TRAJECTORY, wanted):
                yield from (Shape(layout, (name,)) for name in names if name in columns)
        if prompt or _is_list(CHOSEN[0], records):
            yield Shape(Layout.CHOSEN, prompt)
    for responses in _paired(columns):
        if not prompt and not _is_list(responses[0], records):
            continue
        yield from (Shape(Layout.LABELLED, prompt, responses, (name,)) for name in LABELS if name in columns)
        if set(ONE_HOT) <= set(columns) and prompt:
            yield Shape(Layout.ONE_HOT, prompt, responses, ONE_HOT)
        voters = tuple(sorted(name for name in columns if ANNOTATOR.fullmatch(name)))
        if voters:
            yield Shape(Layout.ANNOTATORS, prompt, responses, voters)


def _prompt_columns(columns: Sequence[str]) -> tuple[str, ...]:
    name = next((name for name in PROMPTS if name in columns), None)
    if name is None:
        return ()
    return (name, "input") if name == "instruction" and "input" in columns else (name,)


def _paired(columns: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Give the pairs of response columns; three or more of a kind are no pair."""
    for first, second in RESPONSES:
        stem, end = second[:-1], second[-1]
        neighbours = {stem + {"b": "c", "1": "2", "2": "3"}[end]} | ({stem + "0"} if end == "2" else set())
        if {first, second} <= set(columns) and not neighbours & set(columns):
            yield first, second


def _is_list(name: str, records: Sequence[Mapping[str, object]]) -> bool:
    return any(isinstance(record.get(name), list) for record in records)


def _fit(shape: Shape, records: Sequence[Mapping[str, object]]) -> int:
    """Count the rows that fill a layout; the prompt may be left out where the responses are lists of messages."""
    needed = list(shape.columns)
    if shape.layout is Layout.ANNOTATORS:
        needed = [*shape.prompt[:1], *shape.responses, shape.labels[0]]
    elif _is_list(shape.responses[0], records):
        needed = needed[len(shape.prompt) :]
    else:
        needed = [*shape.prompt[:1], *needed[len(shape.prompt) :]]
    return sum(all(record.get(column) is not None for column in needed) for record in records)


def _no_layout(columns: Sequence[str], where: str, wanted: Layout | None) -> DataError:
    if not columns:
        return DataError(
            f"{where} has no line with a JSON object: give Parquet, JSON, JSONL (one {{…}} a line) or CSV, in UTF-8."
        )
    found = ", ".join(ascii(column)[1:-1][:40] for column in columns[:20]) + (", …" if len(columns) > 20 else "")
    one = next((name for name in UNPAIRED if name in columns), None)
    if wanted is None and one and any(name in columns for name in MARKS):
        return DataError(
            f"{where} is unpaired: it has one answer a row (`{one}`) and a mark for it; pairs need two answers to the "
            "same prompt, so put a good and a bad answer of a prompt into one row (prompt, chosen, rejected)."
        )
    needed = "prompt, chosen, rejected or prompt, response_a, response_b, label"
    layout = f" of the format `{wanted}`" if wanted else ""
    return DataError(f"{where} has the columns {found}; pairs{layout} need {needed}: rename or add columns.")


def wanted_columns(columns: Sequence[str], *, where: str, also: Iterable[str] = ()) -> list[str]:
    """Give the columns that are read; raise DataError where one of them occurs twice."""
    named = {*KNOWN, *also}
    names = [name for name in columns if name in named or name.startswith("rationale") or ANNOTATOR.fullmatch(name)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(f"{where} has the column {twice[0]!r} twice: rename one.")
    if not names:
        raise _no_layout(columns, where, None)
    return names
