"""Set single keys over a document: `--set a.b=value`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from configs.explain import default_at
from configs.syntax import OVERRIDE, Document, Key, Origin, dotted, parse

if TYPE_CHECKING:
    from collections.abc import Sequence


def apply_override(document: Document, text: str) -> None:
    """Set one key from `a.b=value`; the value is YAML, the index of a list counts from 0, its length appends."""
    name, equals, written = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        document.problems.append(f"--set {text}: is no `KEY=VALUE`; write it like `train.learning_rate=1e-5`.")
        return
    if parts == ["preset"]:
        document.problems.append(f"--set {text}: a preset is named in the file, or run by its name.")
        return
    value = parse(written, name=f"--set {text}", layer=OVERRIDE)
    if value.problems:
        document.problems.append(f"--set {text}: the value can't be read as YAML; put it in quotes within the quotes.")
        return
    try:
        key, made = _place(document.values, parts, value.values)
    except LookupError as error:
        document.problems.append(f"--set {text}: {error.args[0]}.")
        return
    document.forget(key)
    for place in (*made, key):
        document.origins[place] = Origin(f"--set {text}", layer=OVERRIDE)


def _place(container: Any, parts: Sequence[str], value: Any) -> tuple[Key, list[Key]]:
    """Put a value below a container; give its key, and those made on the way. Raises LookupError with the reason."""
    key: Key = ()
    made: list[Key] = []
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        index = _index(container, part, key)
        key = (*key, index)
        if following is None:
            put(container, index, value)
            return key, made
        known = index in _indices(container)
        inner = container[index] if known else default_at(key)
        made += [] if known else [key]
        if not isinstance(inner, dict | list):
            if isinstance(inner, str | int | float):
                raise LookupError(f"{dotted(key)} is a single value and has no `{following}`")
            inner = [] if following.isdigit() else {}
        put(container, index, inner)
        container = inner
    return key, made


def _indices(container: dict[str, Any] | list[Any]) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _index(container: dict[str, Any] | list[Any], part: str, key: Key) -> str | int:
    if isinstance(container, dict):
        return part
    if part.isdecimal() and int(part) <= len(container):
        return int(part)
    raise LookupError(f"{dotted(key)} is a list of {len(container)}; give an index from 0, {len(container)} to append")


def put(container: Any, index: str | int, value: Any) -> None:
    """Set an item of a mapping or a list; the index after a list's last appends."""
    if isinstance(container, list) and index == len(container):
        container.append(value)
    else:
        container[index] = value
