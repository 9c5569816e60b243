"""Load a run's description: a preset or a YAML file, overrides on top, every problem found at once."""

from __future__ import annotations

import difflib
import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from configs.check import check, conflicts, is_hub_id
from configs.explain import explain
from configs.overrides import apply_override, put
from configs.run import RunConfig
from configs.syntax import FILE, PRESET, Document, Key, Required, dotted, parse, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ConfigError", "check", "load_config", "presets", "preview", "show", "with_section", "write"]

PRESETS = Path(__file__).parent / "presets"

# Stand for missing values, so that the rest can still be checked; nothing said about them is shown.
_STANDINS: dict[Key, Any] = {
    ("model",): {"base": "."},
    ("model", "base"): ".",
    ("data",): {"sources": [{"name": "missing", "path": "."}]},
    ("data", "sources"): [{"name": "missing", "path": "."}],
    ("prompt",): {"user": "{prompt}{response_a}{response_b}"},
    ("prompt", "user"): "{prompt}{response_a}{response_b}",
}


class ConfigError(ValueError):
    """Refuse a configuration; `problems` holds one sentence for each thing that is wrong."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        head = "" if len(self.problems) == 1 else f"the configuration has {len(self.problems)} problems:\n"
        super().__init__(head + "\n".join(self.problems))


def presets() -> list[str]:
    """Name the presets that ship."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def show(config: RunConfig) -> str:
    """Write a whole configuration as YAML that loads as the same."""
    return write(config.model_dump(mode="json"))


def preview(source: str | Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], int]:
    """Give every key of a configuration with its value or default, and how many values are still to be set.

    Those read `must be set: …`. Raises ConfigError for whatever else is wrong.
    """
    document = _overridden(source, overrides)
    missing = {key: leaf for key, leaf in _leaves(document.values, ()) if isinstance(leaf, Required)}
    config = _validate(document)
    starts = tuple(f"{dotted(key)} (" for key in missing)
    if config is None or not all(problem.startswith(starts) for problem in document.problems):
        raise ConfigError(document.problems)
    values = config.model_dump(mode="json")
    for key, leaf in missing.items():
        put(_at(values, key[:-1]), key[-1], f"must be set: {leaf.description}")
    return values, len(missing)


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a preset by name, or a YAML file, with overrides `a.b=value` on top.

    A file may build on a preset with a top-level `preset: NAME`; its keys win, key by key, lists as a whole.
    Raises ConfigError with all problems at once: of the writing, of each value, and between values.
    """
    document = _overridden(source, overrides)
    config = _validate(document)
    if config is None or document.problems:
        raise ConfigError(document.problems)
    return config


def _overridden(source: str | Path, overrides: Sequence[str]) -> Document:
    document = _read(source)
    for override in overrides:
        apply_override(document, override)
    return document


def with_section(frozen: Mapping[str, Any], name: str, section: Mapping[str, Any]) -> RunConfig:
    """Take a frozen configuration with one section replaced. Raises ConfigError with what that contradicts."""
    try:
        config = RunConfig.model_validate({**frozen, name: section})
    except ValidationError as error:
        raise ConfigError(
            [f"{dotted(key)}: {_stop(text)}" for key, text in explain(error, {**frozen, name: section}).items()]
        ) from None
    if problems := check(config):
        raise ConfigError(problems)
    return config


# ---- files -----------------------------------------------------------------------------------------------------------


def _read(source: str | Path) -> Document:
    """Read a preset, or a file over the preset that it names."""
    if isinstance(source, str) and source in presets():
        return _read_preset(source)
    if not str(source):
        raise ConfigError([f"no configuration is named; presets are {', '.join(presets())}."])
    path = Path(source).expanduser()
    if isinstance(source, str) and not path.exists() and path.parent == Path() and path.suffix not in (".yaml", ".yml"):
        raise ConfigError([f"{source}: is no preset and no file; {_preset_hint(source)}"])
    document = _read_file(path, FILE)
    base = document.values.pop("preset", None)
    if base is None:
        return document
    if base not in presets():
        problem = f"preset ({document.origin(('preset',))}): `{base}` is no preset; {_preset_hint(str(base))}"
        raise ConfigError([*document.problems, problem])  # without it every missing key would be reported
    return _over(_read_preset(base), document)


def _read_preset(name: str) -> Document:
    """Read a preset, over the one that it builds on where it names one."""
    document = _read_file(PRESETS / f"{name}.yaml", PRESET)
    base = document.values.pop("preset", None)
    return document if base is None else _over(_read_preset(base), document)


def _preset_hint(name: str) -> str:
    near = difflib.get_close_matches(name, presets(), 1, 0.4)
    return f"did you mean `{near[0]}`?" if near else f"presets are {', '.join(presets())}."


def _read_file(path: Path, layer: int) -> Document:
    """Read one file that must hold keys and values."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            [f"{path}: there is no file at {path.absolute()}; presets are {', '.join(presets())}."]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: can't be read as UTF-8 text ({error}); give a YAML file."]) from None
    document = parse(text, name=path.name if layer == PRESET else str(path), layer=layer)
    if not isinstance(document.values, dict):
        held = "is empty" if document.values is None else "holds no keys"
        raise ConfigError(
            document.problems or [f"{path}: {held}; write `key: value` lines, or start from `preset: star-dpo`."]
        )
    return document


def _over(base: Document, top: Document) -> Document:
    """Lay a document over another, by presence of keys; a list or a value replaces the whole."""

    def lay(under: dict[str, Any], over: dict[str, Any], key: Key) -> None:
        for name, value in over.items():
            inner = (*key, name)
            if isinstance(value, dict) and isinstance(under.get(name), dict):
                lay(under[name], value, inner)
            else:
                under[name] = value
                base.forget(inner)
                base.origins |= {place: origin for place, origin in top.origins.items() if place[: len(inner)] == inner}

    lay(base.values, top.values, ())
    base.problems += top.problems
    base.origins[()] = top.origin(())
    return base


# ---- validation ------------------------------------------------------------------------------------------------------


def _validate(document: Document) -> RunConfig | None:
    """Check each value, then the values against each other; add what is wrong to the document's problems."""
    wrong: dict[Key, str] = {}
    for key, leaf in list(_leaves(document.values, ())):
        if isinstance(leaf, Required):
            wrong[key] = f"must be set: {leaf.description}; add `--set {dotted(key)}=…`"
            put(_at(document.values, key[:-1]), key[-1], ".")
        elif isinstance(leaf, str) and not _is_text(leaf):
            wrong[key] = "holds half a surrogate pair, which is no character; write the character itself"
            put(_at(document.values, key[:-1]), key[-1], ".")
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            wrong[key] = f"must be a finite number, not {leaf}"
    config, errors = _parse_model(document.values)
    wrong = {**errors, **wrong}
    if errors:
        config = _parse_model(_mended(document.values, errors))[0]
    for key in sorted(wrong, key=lambda key: document.origin(key).rank):
        document.problems.append(f"{dotted(key)} ({document.origin(key)}): {_stop(wrong[key])}")
    if config is not None:
        document.problems += _conflicts(document, config, [_whole(key) or key for key in wrong])
    return config


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stop(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


def _parse_model(values: Any) -> tuple[RunConfig | None, dict[Key, str]]:
    """Build the model by JSON's strict rules: no number in quotes, no true for 1."""
    try:
        return RunConfig.model_validate_json(json.dumps(values), strict=True), {}
    except ValidationError as error:
        return None, explain(error, values)


def _leaves(values: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _leaves(value, (*key, name))
    else:
        yield key, values


def _at(values: Any, key: Key) -> Any:
    for part in key:
        values = values[part]
    return values


def _mended(values: Any, wrong: dict[Key, str]) -> Any:
    """Copy the values with the wrong ones taken out (their defaults hold) and the missing ones stood in for."""
    mended = json.loads(json.dumps(values))
    for key in sorted({_whole(key) for key in wrong} - {()}, key=len, reverse=True):
        container = _at(mended, key[:-1])
        container.pop(key[-1], None)
        if key in _STANDINS:
            container[key[-1]] = _STANDINS[key]
    return mended


def _whole(key: Key) -> Key:
    """Give the key that is taken out where this one is wrong: a list goes as one."""
    return tuple(itertools.takewhile(lambda part: isinstance(part, str), key))


def _conflicts(document: Document, config: RunConfig, wrong: list[Key]) -> list[str]:
    """Give what contradicts, but for what touches a key that is wrong by itself."""
    shown = []
    spoilt = {dotted(key) for key in wrong}
    for conflict in conflicts(config):
        if any(_touch(key, bad) for key in conflict.keys for bad in spoilt):
            continue
        first: Key = tuple(int(part) if part.isdecimal() else part for part in conflict.keys[0].split("."))
        shown.append(f"{conflict.keys[0]} ({document.origin(first)}): {conflict.text}.")
    base, revision = document.origin(("model", "base")), document.origin(("model", "revision"))
    if config.model.revision and base.layer > revision.layer and is_hub_id(config.model.base):
        shown.append(
            f"model.revision ({revision}): belongs to another model than `{config.model.base}` ({base}); set it too."
        )
    return shown


def _touch(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
