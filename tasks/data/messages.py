"""Read one field of a record: a text, a list of messages in the usual spellings, or a whole transcript."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from tasks.data.reasons import BadRow, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

Messages = tuple[tuple[str, str], ...]  # (role, content)

ROLES = {  # ours, and those of ShareGPT
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
}
SPEAKERS = {"Human": "user", "Assistant": "assistant"}  # of a transcript like those of hh-rlhf
_TURN = re.compile(r"\n\n(Human|Assistant):")


def field(record: Mapping[str, object], name: str) -> object:
    """Give a field that must be there; raise BadRow where it is missing or could not be read."""
    value = record.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise BadRow(Reason.MISSING_FIELD, name)
    if isinstance(value, BadRow):
        raise BadRow(value.reason, name)
    return value


def optional(record: Mapping[str, object], name: str) -> str | None:
    """Give a field as text; null, NaN and the empty text are None."""
    value = record.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, int | float):
        return str(value)
    return text(field(record, name), name) or None


def turns(value: object, name: str, role: str) -> Messages:
    """Read a text (a single message of `role`), a message, a list of messages or a list of content parts."""
    if isinstance(value, str | bytes):
        return ((role, text(value, name)),)
    if isinstance(value, dict) and _speaker(value):
        return (_message(value, name),)
    if not isinstance(value, list):
        raise BadRow(Reason.BAD_TYPE, f"{name} is {kind(value)}; a text or a list of messages is wanted")
    if value and all(isinstance(item, dict) and "type" in item and _speaker(item) is None for item in value):
        return ((role, _content(value, name)),)
    return tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(value))


def transcript(value: object, name: str) -> Messages:
    """Part a conversation in one text, `Human: …` and `Assistant: …` after blank lines, into its messages, stripped."""
    start, *parts = _TURN.split("\n\n" + text(value, name).lstrip())
    if start or not parts:
        raise BadRow(Reason.BAD_TYPE, f"{name} doesn't begin with Human: or Assistant:")
    return tuple((SPEAKERS[who], said.strip()) for who, said in zip(parts[::2], parts[1::2], strict=True))


def is_transcript(value: object) -> bool:
    """Say whether a value looks like a whole conversation in one text."""
    return isinstance(value, str) and value.lstrip().startswith("Human:") and "\n\nAssistant:" in value


def text(value: object, name: str) -> str:
    """Give a text that can be stored; raise BadRow for anything else."""
    if value is None:
        raise BadRow(Reason.MISSING_FIELD, name)
    if not isinstance(value, str | bytes):
        raise BadRow(Reason.BAD_TYPE, f"{name} is {kind(value)}; a text is wanted")
    try:
        found = value.decode() if isinstance(value, bytes) else value
        if not found.isascii():
            found.encode()
    except UnicodeError:
        raise BadRow(Reason.BAD_ENCODING, f"{name} is no valid UTF-8") from None
    if "\0" in found:
        raise BadRow(Reason.BAD_ENCODING, f"{name} has a null byte")
    return found


def kind(value: object) -> str:
    """Name what a value is, for a sentence."""
    words = {"list": "a list", "dict": "an object", "NoneType": "null", "bool": "a truth value", "tuple": "a map"}
    return words.get(
        type(value).__name__, "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    )


def _speaker(item: Mapping[str, object]) -> str | None:
    """Name the key that says who speaks: `role`, or `from` as in ShareGPT."""
    return next((key for key in ("role", "from") if item.get(key) is not None), None)


def _message(item: object, name: str) -> tuple[str, str]:
    if not isinstance(item, dict):
        raise BadRow(Reason.BAD_TYPE, f"{name} is {kind(item)}; an object with role and content is wanted")
    speaker = "from" if _speaker(item) == "from" else "role"
    said = "value" if speaker == "from" else "content"
    role, content = text(item.get(speaker), f"{name}.{speaker}"), _content(item.get(said), f"{name}.{said}")
    if role not in ROLES:
        raise BadRow(Reason.BAD_TYPE, f"{name}.{speaker} is {ascii(role)[:60]}; {', '.join(sorted(ROLES))} are known")
    return ROLES[role], content


def _content(value: object, name: str) -> str:
    """Read a message's content: a text, or typed parts, whose texts are put together."""
    if not isinstance(value, list):
        return text(value, name)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise BadRow(Reason.BAD_TYPE, f"{name}[{index}] is {kind(part)}; a content part is wanted")
        if part.get("type") != "text":
            found = ascii(part.get("type"))[:60]
            raise BadRow(Reason.NOT_TEXT, f"{name}[{index}] is a part of type {found}; only text is judged")
        parts.append(text(part.get("text"), f"{name}[{index}].text"))
    return "".join(parts)
