"""Bounds on what a chat template does: its steps, and the size of everything that it makes.

A template is a program of somebody else's. Jinja's sandbox keeps it from the rest of the process,
not from looping for years or from doubling a text forty times. So every loop, call, filter,
operator and output of a rendering pays from one budget, by the size of its arguments and its
result, before anything of that size is made; containers count with all that is in them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 8 << 20  # of a rendered prompt, and the largest value that a template may make
MAX_WORK = 64 << 20  # characters and elements that all operations of one rendering may handle
STEP, CALL = 16, 256  # what a turn of a loop and a call cost besides
ELEMENT = 8  # what an element of a container costs, as its place in memory does
MAX_DIGITS = 4096  # bits of an integer
MAX_WIDTH = 10_000  # of what pads or repeats by a number
_WIDE = re.compile(r"[0-9]{5}|\*|:[^{}]*\{")  # widths in formats, given and computed
_COUNTED, _MEASURED, _JOINED = "scanwright_counted", "scanwright_measured", "scanwright_joined"
# Filters that take containers as they are, so that what is in them need not be looked at.
_SHALLOW = frozenset(
    """length count first last map select selectattr reject rejectattr items default d attr list
    random batch slice abs round""".split()
)
_left: ContextVar[int] = ContextVar("left")


class TooMuch(Exception):
    """A template goes on for too long, or makes too much."""


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """One rendering."""
    token = _left.set(MAX_WORK)
    try:
        yield
    finally:
        _left.reset(token)


def spend(cost: int) -> None:
    """Take `cost` from the rendering's budget, where one goes on. Raises TooMuch."""
    left = _left.get(None)
    if left is not None:
        if cost > left:
            raise TooMuch(f"more work than {MAX_WORK} characters are")
        _left.set(left - cost)


def size(value: Any) -> int:
    """Characters and elements of `value`, all that is in it included. TooMuch beyond MAX_CHARS."""
    total, stack = 0, [value]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, (list, tuple, set, frozenset)):
            total += ELEMENT * len(each)
            stack += each if total <= MAX_CHARS else ()
        elif isinstance(each, Mapping):
            total += ELEMENT * len(each)
            stack += [*each.keys(), *each.values()] if total <= MAX_CHARS else ()
        elif isinstance(each, int) and each.bit_length() > MAX_DIGITS:
            raise TooMuch("a number of too many digits")
        total += 1
        if total > MAX_CHARS:
            raise TooMuch(f"more than {MAX_CHARS} characters")
    return total


def measured(value: Any) -> Any:
    """`value`, paid for."""
    spend(size(value))
    return value


def counted(values: Iterable[Any]) -> Any:
    """`values`, each of which is paid for when a loop comes to it."""
    if isinstance(values, jinja2.Undefined):
        return values

    def turns() -> Iterator[Any]:
        for value in values:
            spend(STEP)
            yield value

    return _Sized(turns(), values) if hasattr(values, "__len__") else turns()


class _Sized:
    """An iterator that knows how many there are, for `loop.length` and `loop.last`."""

    def __init__(self, turns: Iterator[Any], values: Any) -> None:
        self._turns, self._values = turns, values

    def __iter__(self) -> Iterator[Any]:
        return self._turns

    def __len__(self) -> int:
        return len(self._values)


def joined(parts: list[Any]) -> str:
    """What `~` makes of `parts`."""
    spend(sum(map(size, parts)))
    return "".join(map(str, parts))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget. Templates are compiled by `bounded_template`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=measured, **options)
        for name in [*self.filters]:
            self.bound_filter(name, self.filters[name])
        self.filters |= {_COUNTED: counted, _MEASURED: measured, _JOINED: joined}

    def bound_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, which pays from the budget."""
        self.filters[name] = _bounded(name, function)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an intercepted operator."""
        if operator == "**" and not (_small(left) and _small(right)):
            raise TooMuch("a power of large numbers")
        if operator == "*" and (_sequence(left) or _sequence(right)):
            each = 1 if isinstance(left, str) or isinstance(right, str) else ELEMENT
            _check_size(_weight(left) * _weight(right) * each)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        else:
            spend(size(left) + size(right) if _sequence(left) or _sequence(right) else STEP)
        found = super().call_binop(context, operator, left, right)
        return measured(found) if not isinstance(found, str) else found

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call from a template."""
        spend(CALL)
        # `format` comes wrapped by the sandbox
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(obj, "__name__", ""), [*args, *kwargs.values()])
        found = super().call(context, obj, *args, **kwargs)
        return measured(found) if isinstance(owner, str) else found

    def bounded_template(self, text: str) -> jinja2.Template:
        """The template `text`, with loops, `~`, comparisons, slices and literals paid for."""
        tree = self.parse(text)
        _rewrite(tree)
        tree.set_environment(self)
        return self.from_string(tree)


def _rewrite(node: nodes.Node) -> None:
    """Put the filters that pay into the tree below `node`."""
    for name, value in [*node.iter_fields()]:
        if isinstance(value, nodes.Node):
            _rewrite(value)
            setattr(node, name, _paid(node, name, value))
        elif isinstance(value, list):
            for i, each in enumerate(value):
                if isinstance(each, nodes.Node):
                    _rewrite(each)
                    value[i] = _paid(node, name, each)


def _paid(parent: nodes.Node, name: str, node: nodes.Node) -> nodes.Node:
    if isinstance(parent, nodes.For) and name == "iter":
        return _filter(node, _COUNTED)
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED)
    compared = isinstance(parent, (nodes.Compare, nodes.Operand, nodes.Test)) and name in (
        "expr", "node")  # fmt: skip
    sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    literal = isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and (
        getattr(node, "ctx", "load") == "load")  # fmt: skip
    plain = isinstance(node, nodes.Expr) and not isinstance(node, (nodes.Const, nodes.Name))
    if sliced or literal or (compared and plain):
        return _filter(node, _MEASURED)
    return node


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its arguments and its result."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if not _of_jinja(each)]
        deep = name not in _SHALLOW
        weight = sum(map(size, given)) if deep else sum(map(_weight, given[1:]))
        spend(CALL + weight)
        if any(type(each) is int and abs(each) > MAX_WIDTH for each in given[1:]) and (
            name not in ("default", "d", "round", "int")
        ):
            raise TooMuch(f"{name} by more than {MAX_WIDTH}")
        _check_filter(name, given, kwargs)
        return measured(found) if isinstance(found := function(*args, **kwargs), str) else found

    return bounded


def _check_filter(name: str, given: list[Any], kwargs: Mapping[str, Any]) -> None:
    """TooMuch for the filters whose result may be much longer than what they are given."""
    text = given[0] if given and isinstance(given[0], str) else ""
    if name == "format":
        _check_format(text, given[1:])
    elif name == "replace" and len(given) > 2:
        _check_method(str(given[0]), "replace", [str(each) for each in given[1:3]])
    elif name in ("wordwrap", "indent", "join", "batch", "tojson", "pprint"):
        longest = max([1, *(len(each) for each in given[1:] if isinstance(each, str))])
        numbers = [abs(each) for each in given[1:] if type(each) is int]
        count = size(given[0]) if name != "batch" else 1
        _check_size(count * max([longest, *(numbers if name != "wordwrap" else ())]))
    elif name == "sum" and any(_sequence(each) for each in (*given[1:], *kwargs.values())):
        raise TooMuch("a sum of lists")


def _check_method(text: str, name: str, args: list[Any]) -> None:
    """TooMuch for a method of `text` whose result would be."""
    spend(len(text) + sum(map(size, args)))
    texts = [each for each in args if isinstance(each, str)]
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        if any(isinstance(each, int) and abs(each) > MAX_WIDTH for each in args):
            raise TooMuch(f"{name} by more than {MAX_WIDTH}")
        _check_size(len(text) * MAX_WIDTH if name == "expandtabs" and len(text) > 800 else 1)
    elif name == "replace" and len(texts) == 2:
        times = text.count(texts[0]) if texts[0] else len(text) + 1
        _check_size(len(text) + times * len(texts[1]))
    elif name == "join" and args:
        count = len(args[0]) if hasattr(args[0], "__len__") else MAX_WIDTH
        _check_size(count * len(text) + size(args[0]))
    elif name in ("format", "format_map"):
        _check_format(text, args)
    elif name in ("translate", "maketrans"):
        raise TooMuch(f"{name} is not to be had")


def _check_format(text: str, args: Iterable[Any]) -> None:
    """TooMuch for a format that is wide, or repeats large values."""
    if _WIDE.search(text):
        raise TooMuch("a format that is too wide")
    largest = max([1, *(size(each) for each in args)])
    _check_size(len(text) + (text.count("%") + text.count("{")) * largest * 2)


def _check_size(count: int) -> None:
    if count > MAX_CHARS:
        raise TooMuch(f"more than {MAX_CHARS} characters")
    spend(count)


def _of_jinja(value: Any) -> bool:
    """Whether `value` is what Jinja hands to a filter besides its arguments."""
    kinds = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)
    return isinstance(value, kinds)


def _small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= 1000


def _sequence(value: Any) -> bool:
    return isinstance(value, (str, list, tuple))


def _weight(value: Any) -> int:
    """The length of a sequence, the magnitude of a number."""
    if _sequence(value):
        return max(1, len(value))
    return abs(value) if isinstance(value, int) else 1
