"""Chat templates: Jinja text that ships with a checkpoint and turns messages into a prompt.

The environment is the one that such templates are written for (transformers'
`apply_chat_template`): blocks trimmed and left-stripped, `break` and `continue`, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`. Templates are somebody else's
code, so they run in Jinja's sandbox, on immutable values, with a bound on what they produce.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from runtime import tokenizer as tokenizers
from runtime.errors import UserError
from runtime.server.bounds import MAX_CHARS, BoundedEnvironment, TooMuch, budget
from runtime.server.fields import ApiError

if TYPE_CHECKING:
    from runtime.manifest import FileRef

JINJA_NAME, JSON_NAME = "chat_template.jinja", "chat_template.json"
MAP_NAME = "special_tokens_map.json"
RESERVED = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "raise_exception"}
    | {"strftime_now", "range"}
)
MAX_STEPS = 1_000_000  # numbers that all range() calls of one rendering may give out
_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class ChatTemplate:
    """One compiled template. `path` names it in messages; `special_tokens` are its variables.

    Raises UserError if the text is not a template.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str] | None = None,
        path: Path = Path(JINJA_NAME),
    ) -> None:
        self.special_tokens = dict(special_tokens or {})
        self._text = text
        try:
            self._template = _environment().bounded_template(text)
        except (
            jinja2.TemplateError,
            RecursionError,
            MemoryError,
            SyntaxError,
            ValueError,
        ) as error:
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            words = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"{path}: {line}{words}; expected a Jinja chat template; fix the checkpoint's"
                " template and rebuild"
            ) from error

    def mentions(self, word: str) -> bool:
        """Whether the template's text holds `word`."""
        return word in self._text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises ApiError 400 with the template's own words if it refuses."""
        values = {
            **self.special_tokens,
            **(variables or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            "range": _range(MAX_STEPS),
        }
        parts, size = [], 0
        try:
            with budget():
                for part in self._template.generate(values):
                    parts.append(part)
                    size += len(part)
                    if size > MAX_CHARS:
                        raise TooMuch(f"more than {MAX_CHARS} characters")
        except Exception as error:  # whatever a template does wrong is not the server's fault
            words = " ".join(str(error).split()) or type(error).__name__
            raise ApiError(
                400, f"messages: the chat template refused them: {words}", "messages"
            ) from error
        return "".join(parts)


def load(bundle: Path, files: Sequence[FileRef]) -> ChatTemplate | None:
    """The chat template among a bundle's tokenizer files; None if there is none.

    chat_template.jinja counts first, then chat_template.json, then `chat_template` of
    tokenizer_config.json (of a list, the one called default). Raises UserError naming the file.
    """
    found = {Path(ref.path).name: ref for ref in files}

    def read(name: str) -> dict[str, Any]:
        if name not in found:
            return {}
        return tokenizers.read_object(bundle, found[name])

    config = read(tokenizers.CONFIG_NAME)
    special = special_tokens(read(MAP_NAME), config)
    if JINJA_NAME in found:
        text = tokenizers.read_text(bundle, found[JINJA_NAME])
        return ChatTemplate(text, special, bundle / found[JINJA_NAME].path)
    sources = ((JSON_NAME, read(JSON_NAME)), (tokenizers.CONFIG_NAME, config))
    for name, values in sources:
        if (value := values.get("chat_template")) is not None:
            path = bundle / found[name].path
            text = _default(value, path)
            return None if text is None else ChatTemplate(text, special, path)
    return None


def special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like by name, from the files that list them; later ones count."""
    found = {}
    for values in sources:
        for name in (f"{kind}_token" for kind in _TOKENS):
            value = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _default(value: Any, path: Path) -> str | None:
    """The template of a `chat_template` entry: its text, or the one named default of a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        named = {item.get("name"): item.get("template") for item in value}
        text = named.get("default")
        if text is None or isinstance(text, str):
            return text
    raise UserError(
        f"{path}: chat_template: found {type(value).__name__}, expected a string or a list of"
        " objects with name and template; fix the checkpoint's tokenizer and rebuild"
    )


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant said, for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.bound_filter("tojson", _tojson)
    del environment.globals["lipsum"]  # makes text without end
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _range(budget: int) -> Callable[..., range]:
    """range() for one rendering: all calls together give out at most `budget` numbers."""
    left = budget

    def bounded(*args: int) -> range:
        nonlocal left
        found = range(*args)
        left -= max(1, len(found))
        if left < 0:
            raise TooMuch(f"more than {budget} steps of range()")
        return found

    return bounded
