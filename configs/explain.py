"""Put what pydantic found into sentences for a person: where, what, what to do."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from configs.run import RunConfig
from configs.syntax import Key, dotted

TEXTS = {
    "int_type": "must be a whole number, not {input}",
    "int_from_float": "must be a whole number, not {input}",
    "float_type": "must be a number, not {input}",
    "bool_type": "must be true or false, not {input}",
    "string_type": "must be text, not {input}; put it in quotes",
    "tuple_type": "must be a list, not {input}; write `- ` before each item",
    "dict_type": "must be a section of keys, not {input}",
    "greater_than": "must be above {gt}, not {input}",
    "greater_than_equal": "must be at least {ge}, not {input}",
    "less_than": "must be below {lt}, not {input}",
    "less_than_equal": "must be at most {le}, not {input}",
    "too_short": "must hold at least {min_length} item, not {actual_length}",
    "string_pattern_mismatch": "must match {pattern} (letters, digits and the signs in it), not {input}",
    "value_error": "{error}",
}


def explain(error: ValidationError, values: Any) -> dict[Key, str]:
    """Give one text for each key of `values` that is wrong."""
    texts: dict[Key, str] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]:
            continue  # pydantic counts what was right; the wrong items have texts of their own
        key = _existing(item["loc"], values, missing=item["type"] == "missing")
        text = _text(key, dict(item))
        if key in texts and text not in texts[key]:  # the branches of a union
            text = f"{texts[key]}, or {text}"
        texts[key] = text
    return texts


def _existing(loc: Key, values: Any, *, missing: bool) -> Key:
    """Cut what pydantic adds behind a key: the names of a union's branches."""
    for depth, part in enumerate(loc):
        inside = part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int)
        if not inside:
            return loc[: depth + 1] if missing else loc[:depth]
        values = values[part]
    return loc


def _text(key: Key, item: dict[str, Any]) -> str:
    kind, given = item["type"], item.get("input")
    if kind == "extra_forbidden":
        return _unknown(key)
    if kind == "missing":
        return f"must be set{_needed(key)}"
    if kind in ("model_type", "model_attributes_type"):
        empty = "is empty; give it keys or take the line out"
        return empty if given is None else f"must be a section of keys, not {_short(given)}; write its keys below it"
    if kind == "string_type" and given is None:
        return "must be text, not nothing"
    if kind in ("enum", "literal_error"):
        return _closed(given, item["ctx"]["expected"])
    if kind not in TEXTS:
        return f"{item['msg'][:1].lower()}{item['msg'][1:]}, not {_short(given)}"
    return TEXTS[kind].format_map({**item.get("ctx", {}), "input": _short(given)})


def _needed(key: Key) -> str:
    """Say what a missing key is: its description, or the keys that its section must have."""
    section = section_at(key)
    if section is None:
        description = description_of(key)
        return f": {description}" if description else ""
    required = [f"`{dotted((*key, name))}`" for name, field in section.model_fields.items() if field.is_required()]
    return f": give {', '.join(required)}" if required else ""


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value) if isinstance(value, str | list | dict) else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}…"


def _closed(given: Any, expected: str) -> str:
    text = f"is {_short(given)}, which is not one of {expected.replace(' or ', ', ')}"
    return text + _nearest(given, re.findall(r"'([^']*)'", expected))


def _nearest(word: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(word), known, 1, 0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


def _unknown(key: Key) -> str:
    """Name the nearest known key: of the same section, else the same word in another one."""
    name, section = str(key[-1]), section_at(key[:-1])
    known = list(section.model_fields) if section else []
    if near := difflib.get_close_matches(name, known, 1, 0.6):
        return f"is no known key; did you mean `{dotted((*key[:-1], near[0]))}`?"
    if elsewhere := [other for other in all_keys() if other.rpartition(".")[2] == name]:
        return f"is no known key; did you mean {' or '.join(f'`{other}`' for other in elsewhere)}?"
    return f"is no known key; known here are {', '.join(known)}"


def section_at(key: Key) -> type[BaseModel] | None:
    """Give the section that a key names; None where the key is a value or unknown."""
    section: type[BaseModel] | None = RunConfig
    for part in key:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if section else None
        section = _section_in(field.annotation) if field else None
    return section


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def description_of(key: Key) -> str | None:
    """Give the description of a key, where it has one."""
    section = section_at(key[:-1])
    field = section.model_fields.get(str(key[-1])) if section and key else None
    return field.description if field else None


def default_at(key: Key) -> Any:
    """Give a key's default in its JSON form; None where it has none."""
    section = section_at(key[:-1])
    field = section.model_fields.get(str(key[-1])) if section else None
    default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


def all_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Spell every key there is; items of a list stand as `0`."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        inner = _section_in(field.annotation)
        listed = ".0" if str(field.annotation).startswith("tuple") else ""
        keys += all_keys(inner, f"{prefix}{name}{listed}.") if inner else [f"{prefix}{name}"]
    return keys
