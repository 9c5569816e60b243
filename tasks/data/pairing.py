"""Turn one record into a preference pair, or say why it is none."""

from __future__ import annotations

import hashlib
import unicodedata
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from tasks.data.messages import Messages, optional
from tasks.data.reasons import MAX_ROW, BadRow, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.data.layouts import Shape


class Entry(NamedTuple):
    """Hold one clean pair: the columns of `pairs`, what duplicates are found by, and the columns carried along."""

    pair_id: str
    prompt: Messages
    response_a: str
    response_b: str
    gold: str
    group: str
    source: str
    subset: str
    twin: str  # the same for a pair and its order-swapped twin
    low: bool  # the better response comes first in code-point order: compares winners between twins
    carried: tuple[str | None, ...]


def clean(record: Mapping[str, object], shape: Shape, *, name: str, carried: Sequence[str] = ()) -> Entry:
    """Make a pair of a record; raise BadRow where it is none.

    Labelled responses stay as they are given. Of chosen and rejected, a digest of the content picks the one stored as
    response_a, so that gold is A about half the time and the position tells nothing.
    """
    gold = shape.gold(record)
    prompt, one, two = _conversation(record, shape)
    _refuse_empty(prompt, one, two, names=shape.responses)
    twin = twin_key(prompt, one, two)
    low, high = sorted((one, two))
    if not shape.labels:
        chosen = one
        one, two = (low, high) if int(twin[1], 16) % 2 else (high, low)
        gold = "A" if one == chosen else "B"
    return Entry(
        pair_id=pair_id(prompt, one, two),
        prompt=prompt,
        response_a=one,
        response_b=two,
        gold=gold,
        group=_group(record, shape) or prompt_key(prompt),
        source=optional(record, "source") or name,
        subset=optional(record, "subset") or name,
        twin=twin,
        low=(one if gold == "A" else two) == low,
        carried=tuple(optional(record, column) for column in carried),
    )


def _group(record: Mapping[str, object], shape: Shape) -> str | None:
    return optional(record, "group") or (optional(record, shape.tree) if shape.tree else None)


def pair_id(prompt: Messages, response_a: str, response_b: str) -> str:
    """Name a pair by its content as stored: `p` + 24 hex digits of a SHA-256.

    It is over the number of messages, each message's role and content, response_a and response_b, each part written as
    a netstring (length in characters, colon, text, comma), in UTF-8.
    """
    return _digest("p", prompt, response_a, response_b)


def prompt_key(prompt: Messages) -> str:
    """Name what is asked: a digest of the first user message, without regard to case, spaces and Unicode form."""
    asked = next((content for role, content in prompt if role == "user"), None)
    text = asked if asked is not None else "\n".join(content for _, content in prompt)
    return _name("g", " ".join(unicodedata.normalize("NFKC", text).casefold().split()))


def twin_key(prompt: Messages, response_a: str, response_b: str) -> str:
    """Name a pair so that its order-swapped twin has the same name."""
    return _digest("t", prompt, *sorted((response_a, response_b)))


def _digest(prefix: str, prompt: Messages, one: str, two: str) -> str:
    parts = [str(len(prompt)), *chain.from_iterable(prompt), one, two]
    return _name(prefix, "".join([f"{len(part)}:{part}," for part in parts]))


def _name(prefix: str, text: str) -> str:
    return prefix + hashlib.sha256(text.encode()).hexdigest()[:24]


def _conversation(record: Mapping[str, object], shape: Shape) -> tuple[Messages, str, str]:
    """Part the messages into the prompt and the two last turns."""
    first, second = shape.responses
    given, one, two = shape.sides(record)
    for turns, name in ((one, first), (two, second)):
        if not turns:
            raise BadRow(Reason.EMPTY_RESPONSE, f"{name} has no messages")
    shared = 0
    while shared < min(len(one), len(two)) - 1 and one[shared] == two[shared]:
        shared += 1
    if len(one) != shared + 1 or len(two) != shared + 1:
        raise BadRow(
            Reason.DIVERGING_PROMPT, f"{first} and {second} part before the last message, after {shared} shared ones"
        )
    for turns, name in ((one, first), (two, second)):
        if turns[-1][0] != "assistant":
            raise BadRow(Reason.BAD_TYPE, f"{name} ends with a message of the {turns[-1][0]}")
    if given is None and not shared:
        raise BadRow(Reason.MISSING_FIELD, shape.prompt[0] if shape.prompt else "prompt")
    return _reconcile(given, one[:shared]), one[-1][1], two[-1][1]


def _reconcile(given: Messages | None, shared: Messages) -> Messages:
    """Of the prompt column and the messages that both responses begin with, choose the one that holds the other."""
    if not given or not shared or given == shared:
        return given or shared
    bare_given, bare_shared = ([(role, text.strip()) for role, text in turns] for turns in (given, shared))
    if _within(bare_given, bare_shared):
        return shared
    if _within(bare_shared, bare_given):
        return given
    raise BadRow(Reason.DIVERGING_PROMPT, "the prompt column and the messages that both responses begin with differ")


def _within(inner: list[tuple[str, str]], outer: list[tuple[str, str]]) -> bool:
    return any(outer[start : start + len(inner)] == inner for start in range(len(outer) - len(inner) + 1))


def _refuse_empty(prompt: Messages, one: str, two: str, *, names: tuple[str, str]) -> None:
    if not any(content.strip() for role, content in prompt if role == "user"):
        raise BadRow(Reason.EMPTY_PROMPT, "no user message with text")
    for text, name in ((one, names[0]), (two, names[1])):
        if not text.strip():
            raise BadRow(Reason.EMPTY_RESPONSE, name)
    if one.strip() == two.strip():
        raise BadRow(Reason.IDENTICAL_RESPONSES, f"{len(one)} characters")
    size = sum(len(content) for _, content in prompt) + len(one) + len(two)
    if size > MAX_ROW:
        raise BadRow(Reason.TOO_LARGE, f"{size} characters, at most {MAX_ROW}")
