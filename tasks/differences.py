"""Say in what two key parts differ, as a person would: settings by their names, digests by what they are of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Path = tuple[str, ...]

_ABSENT = object()
_DIGEST_LENGTH = 64
_SHORT = 8  # hex digits of a digest that tell two apart
_WIDTH = 60  # of a shown value


@dataclass(frozen=True)
class Known:
    """Hold what digests stand for: `names` what each is of, `sections` the settings that a digest was made from."""

    names: dict[str, str] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)


def differences(now: Mapping[str, Any], earlier: Mapping[str, Any], known: Known) -> list[str]:
    """Give one line for each part that differs: `sample.temperature 1.0 → 0.7`, earlier value first.

    Both are key parts (step, version, inputs, parts); without a difference the keys are equal.
    """
    return [_line(path, then, now, known) for path, then, now in _compare((), _plain(earlier), _plain(now), known)]


def _plain(parts: Mapping[str, Any]) -> Any:
    """Give the JSON form, as a manifest holds it."""
    return json.loads(json.dumps(parts))


def _compare(path: Path, then: Any, now: Any, known: Known) -> Iterator[tuple[Path, Any, Any]]:
    if then == now:
        return
    if isinstance(then, str) and isinstance(now, str) and {then, now} <= known.sections.keys():
        then, now = known.sections[then], known.sections[now]
    if isinstance(then, list) and isinstance(now, list) and all(isinstance(one, dict) for one in then + now):
        then, now = ({str(number): one for number, one in enumerate(side)} for side in (then, now))
    if isinstance(then, dict) and isinstance(now, dict):
        for name in [*then, *(name for name in now if name not in then)]:
            yield from _compare((*path, name), then.get(name, _ABSENT), now.get(name, _ABSENT), known)
        return
    yield path, then, now


def _line(path: Path, then: Any, now: Any, known: Known) -> str:
    if path[0] == "version":
        return f"version of the step {then} → {now}"
    what = f"input {'.'.join(path[1:])}:" if path[0] == "inputs" else ".".join(path[1:])
    names = [known.names.get(one) if isinstance(one, str) else None for one in (then, now)]
    if names[0] is not None and names[0] == names[1]:
        return f"{what} {names[0]} {then[:_SHORT]} → {now[:_SHORT]}"
    shown = [f"{name} {one[:_SHORT]}" if name else _show(one) for name, one in zip(names, (then, now), strict=True)]
    return f"{what} {shown[0]} → {shown[1]}"


def _show(value: Any) -> str:
    if value is _ABSENT:
        return "(not set)"
    if isinstance(value, str) and len(value) == _DIGEST_LENGTH and not set(value) - set("0123456789abcdef"):
        return value[:_SHORT]
    text = value if isinstance(value, str) and value.isprintable() and value else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
