"""Read and write YAML as a person means it: YAML 1.2 scalars, no duplicate keys, the place of every value kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Key = tuple[str | int, ...]
MAP, SEQUENCE, STRING, REQUIRED = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:str", "!required"

# The scalars of YAML 1.2 (core schema). PyYAML's own are 1.1: there 1e-6 is a string, `off` is false, 1:30 is 90.
SCALARS = {
    "tag:yaml.org,2002:null": (re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    "tag:yaml.org,2002:int": (re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
        list("-+0123456789."),
    ),
    "tag:yaml.org,2002:merge": (re.compile(r"<<"), ["<"]),
}

PRESET, FILE, OVERRIDE = 0, 1, 2  # layers: the greater wins


@dataclass(frozen=True)
class Required:
    """Stand for a value that a preset leaves to the user: `path: !required what it is`."""

    description: str


@dataclass(frozen=True)
class Origin:
    """Say where a value was written."""

    name: str  # a file, or the override as typed
    line: int | None = None  # 1-based
    layer: int = PRESET

    @property
    def rank(self) -> tuple[int, str, int]:
        """Order places as a person reads them."""
        return (self.layer, self.name, self.line or 0)

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass
class Document:
    """Hold the values of one source, where each was written, and what is wrong with the writing."""

    values: Any = None
    origins: dict[Key, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def origin(self, key: Key) -> Origin:
        """Say where a key, or else what it would stand in, was written."""
        return next(self.origins[key[:depth]] for depth in range(len(key), -1, -1) if key[:depth] in self.origins)

    def forget(self, key: Key) -> None:
        """Drop the places of a key and of what stood below it."""
        self.origins = {place: origin for place, origin in self.origins.items() if place[: len(key)] != key}


_REFUSED = object()  # stands for a value that is a problem already, and is left out


class _Loader(yaml.SafeLoader):
    """Construct plain values only, by the 1.2 rules."""


class _Dumper(yaml.SafeDumper):
    """Quote whatever YAML 1.1 or 1.2 would take for something other than a string."""


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {sign: list(of) for sign, of in yaml.SafeDumper.yaml_implicit_resolvers.items()}
for _class in (_Loader, _Dumper):
    for _tag, (_pattern, _first) in SCALARS.items():
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern.pattern})\Z"), _first)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text.startswith(("0x", "0o")) else int(text)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(inf|nan)\Z", r"\1", str(loader.construct_scalar(node)).lower()))


def _construct_required(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Required:
    return Required(str(loader.construct_scalar(node)))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor(REQUIRED, _construct_required)


def _write_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if any(sign in text for sign in "\x85\u2028\u2029\ufeff"):  # line ends to YAML 1.1
        return dumper.represent_scalar(STRING, text, style='"')
    lines = text.split("\n")
    block = (
        len(lines) > 1 and lines[0] != "" and not any(line[:1] in " \t" or line[-1:] in " \t" for line in lines if line)
    )
    return dumper.represent_scalar(STRING, text, style="|" if block else None)


_Dumper.add_representer(str, _write_string)


def write(values: Any) -> str:
    """Write plain values as YAML that `parse` reads back equal."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def parse(text: str, *, name: str, layer: int) -> Document:
    """Read one YAML document; whatever is wrong with the writing is in `problems`, the rest is read all the same."""
    document = Document()
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            reader = _Reader(loader, document, name=name, layer=layer)
            document.values = reader.read(node, ())
    except yaml.YAMLError as error:
        document.problems.append(_syntax_problem(error, name))
    finally:
        if loader is not None:
            loader.dispose()
    return document


def _syntax_problem(error: yaml.YAMLError, name: str) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return (
            f"{name}: this is no YAML text ({str(error).splitlines()[0]}); save it as UTF-8 without control characters."
        )
    mark = error.problem_mark or error.context_mark
    where = name if mark is None else f"{name}:{mark.line + 1}, column {mark.column + 1}"
    context = f" {error.context}" if error.context else ""
    return f"{where}: this is no valid YAML, {error.problem or 'it is broken'}{context}; correct the line."


class _Reader:
    """Walk the nodes of one document."""

    def __init__(self, loader: _Loader, document: Document, *, name: str, layer: int) -> None:
        self._loader = loader
        self._document = document
        self._name = name
        self._layer = layer
        self._open: set[int] = set()
        self._flat: set[int] = set()

    def read(self, node: yaml.Node, key: Key) -> Any:
        """Give the plain value of a node; note its place."""
        line = node.start_mark.line + 1 if key else None
        self._document.origins.setdefault(key, Origin(self._name, line, self._layer))
        if id(node) in self._open:
            return self._refuse(node, key, "an alias points to what contains it; write the value out")
        self._open.add(id(node))
        try:
            return self._value(node, key)
        finally:
            self._open.discard(id(node))

    def _value(self, node: yaml.Node, key: Key) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == MAP:
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == SEQUENCE:
            read = [self.read(item, (*key, index)) for index, item in enumerate(node.value)]
            return [value for value in read if value is not _REFUSED]
        try:
            value = self._loader.construct_object(node, deep=True) if isinstance(node, yaml.ScalarNode) else node
        except (yaml.YAMLError, ValueError):
            value = node
        if not isinstance(value, bool | int | float | str | Required | None):
            return self._refuse(node, key, f"the tag {node.tag} is not known here; write a plain value")
        return value

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        if id(node) not in self._flat:  # an alias brings a node here again, by then with its `<<` written out
            self._flat.add(id(node))
            self._refuse_duplicates(node, key)
            self._loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = (
                self._loader.construct_object(name_node, deep=True) if isinstance(name_node, yaml.ScalarNode) else None
            )
            if not isinstance(name, str):
                self._refuse(name_node, key, "a key here is no word; write it in quotes if it is meant as one")
                continue
            self._document.origins[(*key, name)] = Origin(self._name, name_node.start_mark.line + 1, self._layer)
            value = self.read(value_node, (*key, name))
            if value is not _REFUSED:
                values[name] = value
        return values

    def _refuse_duplicates(self, node: yaml.MappingNode, key: Key) -> None:
        first: dict[str, int] = {}
        for name_node, _ in node.value:
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag == "tag:yaml.org,2002:merge":
                continue
            name = name_node.value
            if name in first:
                self._refuse(name_node, (*key, name), f"this key is in line {first[name]} already; keep one of the two")
            first.setdefault(name, name_node.start_mark.line + 1)

    def _refuse(self, node: yaml.Node, key: Key, what: str) -> object:
        place = f"{self._name}:{node.start_mark.line + 1}"
        self._document.problems.append(f"{dotted(key)} ({place}): {what}.")
        return _REFUSED


def dotted(key: Key) -> str:
    """Spell a key as on the command line: `data.sources.0.path`."""
    return ".".join(str(part) for part in key) or "the configuration"
