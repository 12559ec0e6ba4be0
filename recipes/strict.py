"""A plain subset of YAML, read strictly: what is doubtful is an error that names file:line.

Mappings, sequences, strings, integers, floats, true/false and null. Aliases, anchors and tags are
refused, and so are the YAML 1.1 surprises (`no`, `0755`, `1:30`, dates) that would read as
something else than what is written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import UserError

MAX_BYTES = 1 << 17  # of a file
MAX_DEPTH = 32  # of lists and mappings in each other
MAX_DIGITS = 100  # of a number


class Fields:
    """The top-level mapping of one YAML file; `take` each key once, then `finish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = shown(path)
        root = _compose(path, self.shown)
        if not isinstance(root, yaml.MappingNode):
            raise UserError(
                f"{self.shown}:1: expected a mapping of recipe keys, found something else"
            )
        self.root = root
        self.nodes: dict[str, yaml.Node] = dict(self._pairs(root))
        self.keys: dict[str, yaml.Node] = {key.value: key for key, _ in root.value}
        self.taken: set[str] = set()

    def fail(self, node: yaml.Node, message: str) -> UserError:
        return UserError(f"{self.shown}:{node.start_mark.line + 1}: {message}")

    def fail_key(self, key: str, message: str) -> UserError:
        """An error about `key` as a whole, at the line of its name."""
        return self.fail(self.keys.get(key, self.root), f"{key}: {message}")

    def take(
        self, key: str, read: Callable[[Fields, str, yaml.Node], Any], default: Any = ...
    ) -> Any:
        """The value of `key` by reader `read`; `default` where absent, an error without one."""
        self.taken.add(key)
        if key not in self.nodes:
            if default is ...:
                raise self.fail(self.root, f"missing key {key!r}: add it to the recipe")
            return default
        return read(self, key, self.nodes[key])

    def finish(self) -> None:
        """Raise for the first key that nothing took, with the nearest known names."""
        for key, node in self.nodes.items():
            if key not in self.taken:
                near = nearest(key, self.taken)
                raise self.fail(node, f"unknown key {key!r}: {near}")

    def _pairs(self, node: yaml.MappingNode) -> Iterable[tuple[str, yaml.Node]]:
        seen: set[str] = set()
        for key_node, value in node.value:
            key = scalar(self, "key", key_node)
            if not isinstance(key, str):
                raise self.fail(key_node, f"key {key!r}: expected a string")
            if key in seen:
                raise self.fail(key_node, f"key {key!r} is given twice: remove one")
            seen.add(key)
            yield key, value

    def plain(self, key: str, node: yaml.Node) -> Any:
        """`node` as str, int, float, bool, None, list or dict."""
        if isinstance(node, yaml.MappingNode):
            return {name: self.plain(f"{key}.{name}", value) for name, value in self._pairs(node)}
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(f"{key}[{i}]", item) for i, item in enumerate(node.value)]
        return scalar(self, key, node)


def shown(path: Path) -> str:
    """`path` as an error names it: `recipes/…` for a recipe of this project, else as given."""
    root, full = Path(__file__).resolve().parent, path.resolve()
    if full.is_relative_to(root):
        return f"recipes/{full.relative_to(root).as_posix()}"
    return str(path)


def nearest(word: str, names: Iterable[str]) -> str:
    """`did you mean …?` with up to three close names, or else all of `names`."""
    every = sorted(names)
    close = difflib.get_close_matches(word, every, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"expected one of {', '.join(every)}"


def _compose(path: Path, name: str) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot be read as UTF-8 text: {error}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{name}: more than {MAX_BYTES} bytes, which no recipe needs")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1 if event.start_mark else 1
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise UserError(f"{name}:{line}: nested more than {MAX_DEPTH} deep")
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise UserError(
                    f"{name}:{line}: aliases and anchors are not read: write the value out"
                )
            if getattr(event, "tag", None):
                raise UserError(f"{name}:{line}: tag {event.tag!r} is not read: remove it")
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UserError(f"{name}:{line}: not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}:1: not YAML: {error}") from error


_INT = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?([0-9]+\.[0-9]*([eE][-+][0-9]+)?|\.inf)")


def scalar(fields: Fields, key: str, node: yaml.Node) -> str | int | float | bool | None:
    """A scalar whose YAML reading is the obvious one; anything doubtful is an error."""
    if not isinstance(node, yaml.ScalarNode):
        raise fields.fail(node, f"{key}: expected a single value, found a list or mapping")
    text, kind = node.value, node.tag.rpartition(":")[2]
    if kind in ("int", "float") and len(text) > MAX_DIGITS:
        raise fields.fail(node, f"{key}: {len(text)} characters are no number: quote text")
    if kind == "str":
        if node.style is None and re.fullmatch(r"[-+.0-9][-+.0-9eE_]*[eE][-+.0-9]+", text):
            raise fields.fail(
                node, f"{key}: {text} is text in YAML: write it like 1.0e-5, or quote it"
            )
        return text
    if kind == "null":
        return None
    if kind == "bool" and text in ("true", "false"):
        return text == "true"
    if kind == "int" and _INT.fullmatch(text):
        return int(text)
    if kind == "float" and _FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf"))
    raise fields.fail(node, f"{key}: {text!r} reads as a YAML {kind}: quote it if text is meant")


# readers for Fields.take -------------------------------------------------------------------------


def string(fields: Fields, key: str, node: yaml.Node) -> str:
    value = fields.plain(key, node)
    if not isinstance(value, str) or not value.strip():
        raise fields.fail(node, f"{key}: expected text, found {_kind(value)}")
    return value.strip()


def boolean(fields: Fields, key: str, node: yaml.Node) -> bool:
    value = fields.plain(key, node)
    if not isinstance(value, bool):
        raise fields.fail(node, f"{key}: expected true or false, found {_kind(value)}")
    return value


def mapping(fields: Fields, key: str, node: yaml.Node) -> dict[str, Any]:
    value = fields.plain(key, node)
    if not isinstance(value, dict):
        raise fields.fail(node, f"{key}: expected a mapping, found {_kind(value)}")
    return value


def sequence(fields: Fields, key: str, node: yaml.Node) -> list[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.SequenceNode):
        raise fields.fail(node, f"{key}: expected a list, found {_kind(fields.plain(key, node))}")
    return [(f"{key}[{i}]", item) for i, item in enumerate(node.value)]


def strings(fields: Fields, key: str, node: yaml.Node) -> tuple[str, ...]:
    return tuple(string(fields, name, item) for name, item in sequence(fields, key, node))


def one_of(names: Iterable[str]) -> Callable[[Fields, str, yaml.Node], str]:
    """A reader of one word out of `names`."""
    known = tuple(names)

    def read(fields: Fields, key: str, node: yaml.Node) -> str:
        value = string(fields, key, node)
        if value not in known:
            raise fields.fail(node, f"{key}: {value!r} is not known: {nearest(value, known)}")
        return value

    return read


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return names.get(type(value), f"{type(value).__name__} {value!r}")
