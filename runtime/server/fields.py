"""Reading a client's JSON: strict types and ranges, and one error shape for what is wrong.

A field that is null counts as not given. Numbers are never booleans, integers never have a
fraction, text never holds half of a surrogate pair. Every error names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from runtime.errors import UserError

LARGEST = 2**63 - 1
_SHOWN = 60  # characters of a wrong value that a message repeats
_MESSAGE = 500  # characters of a message


class ApiError(Exception):
    """A refusal in OpenAI's shape; `message` is one line, `param` the field it is about.

    `headers` go out with the response, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = _line(message)
        self.param = param
        self.code = code
        self.type = type
        self.headers = dict(headers or {})
        super().__init__(self.message)

    @classmethod
    def of(
        cls,
        error: UserError,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> ApiError:
        """The same words as a UserError's."""
        return cls(status, str(error), param, code, type, headers)

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code}}


def wrong(name: str, value: Any, expected: str, code: str | None = None) -> NoReturn:
    """Raise ApiError 400: the field `name` holds `value`."""
    raise ApiError(400, f"{name}: found {show(value)}, expected {expected}", name, code)


def show(value: Any) -> str:
    """A short ASCII picture of a JSON value, whatever is in it."""
    if isinstance(value, (list, dict)):
        kind = "list" if isinstance(value, list) else "object"
        return f"{'an' if kind == 'object' else 'a'} {kind} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**_SHOWN:
        return "an integer of too many digits"
    if isinstance(value, str):
        value = value[:_SHOWN]
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body. Raises ApiError 400: not UTF-8, not JSON (NaN and
    Infinity are not), a key twice, nested too deeply, not an object."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: not UTF-8 at byte {error.start}, expected JSON") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ApiError(400, f"body: not JSON at {where} ({error.msg})") from error
    except RecursionError as error:
        raise ApiError(400, "body: nested too deeply, expected plain fields") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise ApiError(400, "body: found an integer of too many digits") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"body: found {show(value)}, expected a JSON object")
    return value


class Fields:
    """The fields of one JSON object; `path` is the object's own place, for messages."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def name(self, key: str) -> str:
        """The field's full name."""
        return f"{self._path}.{key}" if self._path else key

    def get(self, key: str) -> Any:
        """The value as it came; None if it is null or not there."""
        return self._values.get(key)

    def boolean(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            wrong(self.name(key), value, "true or false")
        return value

    def integer(self, key: str, low: int, high: int = LARGEST) -> int | None:
        """An integer from `low` to `high`, both included; None if not given."""
        value = self.get(key)
        if value is None:
            return None
        return checked_integer(self.name(key), value, low, high)

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        """A finite number from `low` to `high`, both included; None if not given."""
        value = self.get(key)
        if value is None:
            return None
        return checked_number(self.name(key), value, low, high)

    def text(self, key: str) -> str | None:
        """A string; None if not given."""
        value = self.get(key)
        if value is None:
            return None
        return checked_text(self.name(key), value)

    def strings(self, key: str, count: int, length: int) -> tuple[str, ...] | None:
        """A string or a list of up to `count`, each of 1 to `length` characters."""
        value = self.get(key)
        if value is None:
            return None
        listed = isinstance(value, list)
        items = value if listed else [value]
        if len(items) > count:
            wrong(self.name(key), value, f"at most {count} strings")
        for place, item in enumerate(items):
            name = f"{self.name(key)}[{place}]" if listed else self.name(key)
            if not checked_text(name, item):
                wrong(name, item, "at least one character")
            if len(item) > length:
                raise ApiError(
                    400, f"{name}: found {len(item)} characters, expected at most {length}", name
                )
        return tuple(items)

    def object(self, key: str) -> Fields | None:
        """An object's fields; None if not given."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            wrong(self.name(key), value, "an object")
        return Fields(value, self.name(key))

    def only(self, key: str, neutral: Iterable[Any], why: str) -> None:
        """Refuse the field unless it is not given or means nothing."""
        value = self.get(key)
        if value is not None and not any(_same(value, plain) for plain in neutral):
            raise ApiError(400, f"{self.name(key)}: found {show(value)}, {why}", self.name(key))


def checked_integer(name: str, value: Any, low: int, high: int = LARGEST) -> int:
    """`value` as an integer in a range. Raises ApiError 400."""
    if type(value) is not int or not low <= value <= high:
        wrong(
            name,
            value,
            f"an integer of {low} or more"
            if high == LARGEST
            else f"an integer from {low} to {high}",
        )
    return value


def checked_number(name: str, value: Any, low: float, high: float) -> float:
    """`value` as a finite number in a range. Raises ApiError 400."""
    fits = type(value) in (int, float) and low <= value <= high
    if not fits or abs(value) > 1e300 or not math.isfinite(value):
        words = "a finite number"
        if math.isfinite(low) and math.isfinite(high):
            words = f"a number from {low:g} to {high:g}"
        elif math.isfinite(low):
            words = f"a finite number of {low:g} or more"
        wrong(name, value, words)
    return float(value)


def checked_text(name: str, value: Any) -> str:
    """`value` as Unicode text. Raises ApiError 400: not a string, half of a surrogate pair."""
    if not isinstance(value, str):
        wrong(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400,
            f"{name}: found half of a surrogate pair at character {error.start}, expected Unicode",
            name,
        ) from error
    return value


def _same(value: Any, plain: Any) -> bool:
    return type(value) is type(plain) and value == plain


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        twice = _line(again)[:_SHOWN]
        raise ApiError(400, f"{twice}: found twice in one object, expected once", twice)
    return found


def _constant(word: str) -> NoReturn:
    raise ApiError(400, f"body: found {word}, expected JSON with finite numbers")


def _line(message: str) -> str:
    """One line, without what UTF-8 cannot carry."""
    text = " ".join(message.encode("utf-8", "replace").decode("utf-8").split())
    return text if len(text) <= _MESSAGE else text[: _MESSAGE - 3] + "..."
