"""Turn one record into a preference pair, or say why it is none."""

from __future__ import annotations

import hashlib
import math
import unicodedata
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_ROW = 16 * 2**20  # bytes of a JSONL line, characters of a row's texts
ROLES = frozenset({"system", "user", "assistant"})
LABELS = {"a": "A", "b": "B"}
TIES = frozenset({"tie", "tied", "draw", "equal", "same", "both", "neither"})

Messages = tuple[tuple[str, str], ...]  # (role, content)


class Reason(StrEnum):
    """Say why a row of a source is no pair, or a pair is in no split."""

    BAD_JSON = "bad_json"
    BAD_ENCODING = "bad_encoding"  # not UTF-8, a lone surrogate or a null byte
    BAD_TYPE = "bad_type"
    BAD_LABEL = "bad_label"  # a text that is neither A, B nor a tie
    MISSING_FIELD = "missing_field"
    TOO_LARGE = "too_large"  # over MAX_ROW: no conversation
    EMPTY_PROMPT = "empty_prompt"
    EMPTY_RESPONSE = "empty_response"
    IDENTICAL_RESPONSES = "identical_responses"  # but for spaces around them
    DIVERGING_PROMPT = "diverging_prompt"  # the two responses answer different conversations
    TIE = "tie"
    DUPLICATE = "duplicate"  # the same pair, or its order-swapped twin, with the same winner
    CONFLICTING_LABEL = "conflicting_label"  # the same pair, or its twin, with another winner: all of them are dropped
    TOO_LONG = "too_long"  # over the token budget
    CONTAMINATED = "contaminated"  # a training pair whose prompt is in dev, test or a suite


class Layout(StrEnum):
    """Name how a source says which response is better."""

    CHOSEN = "chosen/rejected"
    LABELLED = "response_a/response_b/label"


class BadRow(Exception):
    """Carry why a row is no pair, and what exactly was found."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


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


def clean(record: Mapping[str, object], layout: Layout, *, name: str, carried: Sequence[str] = ()) -> Entry:
    """Make a pair of a record; raise BadRow where it is none.

    Labelled responses stay as they are given. Of chosen and rejected, a digest of the content picks the one stored as
    response_a, so that gold is A about half the time and the position tells nothing.
    """
    first, second = ("chosen", "rejected") if layout is Layout.CHOSEN else ("response_a", "response_b")
    gold = "A" if layout is Layout.CHOSEN else _label(_field(record, "label"))
    prompt, one, two = _conversation(record, first, second)
    _refuse_empty(prompt, one, two, names=(first, second))
    twin = twin_key(prompt, one, two)
    low, high = sorted((one, two))
    if layout is Layout.CHOSEN:
        chosen = one
        one, two = (low, high) if int(twin[1], 16) % 2 else (high, low)
        gold = "A" if one == chosen else "B"
    return Entry(
        pair_id=pair_id(prompt, one, two),
        prompt=prompt,
        response_a=one,
        response_b=two,
        gold=gold,
        group=_optional(record, "group") or prompt_key(prompt),
        source=_optional(record, "source") or name,
        subset=_optional(record, "subset") or name,
        twin=twin,
        low=(one if gold == "A" else two) == low,
        carried=tuple(_optional(record, column) for column in carried),
    )


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


def _conversation(record: Mapping[str, object], first: str, second: str) -> tuple[Messages, str, str]:
    """Part the messages into the prompt and the two last turns."""
    one, two = (_turns(_field(record, name), name, "assistant") for name in (first, second))
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
    given = None if shared and record.get("prompt") is None else _turns(_field(record, "prompt"), "prompt", "user")
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


def _field(record: Mapping[str, object], name: str) -> object:
    value = record.get(name)
    if value is None:
        raise BadRow(Reason.MISSING_FIELD, name)
    if isinstance(value, BadRow):
        raise BadRow(value.reason, name)
    return value


def _optional(record: Mapping[str, object], name: str) -> str | None:
    value = record.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, int | float):
        return str(value)
    return _text(_field(record, name), name) or None


def _label(value: object) -> str:
    word = _text(value, "label").strip().casefold()
    if word in TIES:
        raise BadRow(Reason.TIE, f"label {word}")
    if word not in LABELS:
        raise BadRow(Reason.BAD_LABEL, f"label {ascii(word)[:60]}; A, B or tie is wanted")
    return LABELS[word]


def _turns(value: object, name: str, role: str) -> Messages:
    """Read a text (a single message of `role`) or a list of {role, content}."""
    if isinstance(value, str | bytes):
        return ((role, _text(value, name)),)
    if not isinstance(value, list):
        raise BadRow(Reason.BAD_TYPE, f"{name} is {_kind(value)}; a text or a list of messages is wanted")
    return tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(value))


def _message(item: object, name: str) -> tuple[str, str]:
    if not isinstance(item, dict):
        raise BadRow(Reason.BAD_TYPE, f"{name} is {_kind(item)}; an object with role and content is wanted")
    role, content = _text(item.get("role"), name + ".role"), _text(item.get("content"), name + ".content")
    if role not in ROLES:
        raise BadRow(Reason.BAD_TYPE, f"{name}.role is {ascii(role)[:60]}; {', '.join(sorted(ROLES))} are known")
    return role, content


def _text(value: object, name: str) -> str:
    if value is None:
        raise BadRow(Reason.MISSING_FIELD, name)
    if not isinstance(value, str | bytes):
        raise BadRow(Reason.BAD_TYPE, f"{name} is {_kind(value)}; a text is wanted")
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not text.isascii():
            text.encode()
    except UnicodeError:
        raise BadRow(Reason.BAD_ENCODING, f"{name} is no valid UTF-8") from None
    if "\0" in text:
        raise BadRow(Reason.BAD_ENCODING, f"{name} has a null byte")
    return text


def _kind(value: object) -> str:
    words = {"list": "a list", "dict": "an object", "NoneType": "null", "bool": "a truth value", "tuple": "a map"}
    return words.get(
        type(value).__name__, "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    )
