"""Parse raw request bytes into a checked request, or an error message that helps its sender.

JSON is parsed strictly: no NaN or Infinity, no lone surrogates, no broken UTF-8, no NUL characters, at most 100
levels of nesting (`nesting`); integers beyond 64 bits are refused. The fast path is one parse and one validation; only
a body that failed is parsed again, to name the wrong field.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from pagemill_api.openai.fields import RequestModel
from pagemill_api.openai.unknown_fields import COLLECTED
from pagemill_protocol import nesting
from pagemill_protocol.errors import PagemillError, show

Model = TypeVar("Model", bound=BaseModel)

_MAX_PARAM_CHARS = 200
_MAX_SEARCHED_VALUES = 200_000
_KIND = re.compile(
    r"str|bool|int|float|(?:list|dict|literal)\[.*|constrained-\w+|function-.*|nullable|[A-Z]\w+", re.DOTALL
)
"""Names that pydantic puts into a path for the kinds of which a value may be. No field of a schema has one."""
_EXPECTATIONS: dict[str, str] = {
    "missing": "is required",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_size": "must be an integer of at most 64 bits",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} character(s)",
    "list_type": "must be a list",
    "too_short": "must have at least {min_length} item(s)",
    "too_long": "must have at most {max_length} item(s)",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "literal_error": "must be one of {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}


def parse_body(raw: bytes, schema: type[Model]) -> Model:
    """Return the request in `raw`. Raises `PagemillError` 400 whose `param` is the first wrong field."""
    data = parse_json(raw)
    if not isinstance(data, dict):
        raise _invalid(None, f"The request body must be a JSON object, got {show(data)}.", "invalid_json")
    if _has_escaped_nul(raw):
        path = _find(data, lambda value: isinstance(value, str) and "\x00" in value)
        raise _invalid(path, f"`{path or 'The body'}` contains the character U+0000. Remove it.", "invalid_value")
    try:
        model = schema.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None
    if (found := COLLECTED.get()) is not None and found.by_schema:
        found.prefixes = _prefixes(schema)
    return model


@cache
def _prefixes(schema: type[BaseModel]) -> Mapping[type, str]:
    """Return the path before the fields of each schema that occurs in this one."""
    paths: dict[type, str] = {}
    for path, part in schema.parts() if issubclass(schema, RequestModel) else ():
        paths.setdefault(part, path)
    return paths


def parse_json(raw: bytes, max_levels: int = nesting.MAX_LEVELS) -> Any:
    """Return any JSON value in `raw`, parsed strictly. Raises `PagemillError` 400."""
    if not raw.strip(b" \t\r\n"):
        raise _invalid(None, "The request body is empty. Send a JSON object.", "invalid_json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _explain_bad_json(raw, error) from None
    if nesting.may_exceed(raw):
        nesting.check_value(value, max_levels)
    return value


def _has_escaped_nul(raw: bytes) -> bool:
    """Whether the text has an escaped NUL whose backslash is not escaped itself.

    A regular expression would hold the interpreter's lock for the whole search.
    """
    *before, _ = raw.split(b"\\u0000")
    return any((len(piece) - len(piece.rstrip(b"\\"))) % 2 == 0 for piece in before)


def _explain_bad_json(raw: bytes, error: orjson.JSONDecodeError) -> PagemillError:
    """Return an error that names the field of a body which lenient parsers accept, else the position of the error."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as broken:
        return _invalid(
            _last_key(raw[: broken.start]),
            f"The request body is not valid UTF-8: byte {broken.start} cannot be decoded. Encode the JSON as UTF-8.",
            "invalid_json",
        )
    if "depth" in str(error):
        return nesting.nested_too_deeply(nesting.path_in_text(raw) or _last_key(raw[: error.pos]) or "")
    try:
        lenient = json.loads(text, parse_int=_lenient_int)
    except (ValueError, RecursionError):
        return _invalid(
            None,
            f"The request body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}.",
            "invalid_json",
        )
    path = _find(lenient, _is_infinite)
    if path is not None:
        return _invalid(path, f"`{path}` is NaN, infinite or too large. Send a finite number.", "invalid_value")
    path = _find(lenient, _has_surrogate)
    if path is not None:
        return _invalid(
            path, f"`{path}` contains half of a surrogate pair. Send complete Unicode characters.", "invalid_value"
        )
    return _invalid(None, f"The request body is not valid JSON: {error.msg}.", "invalid_json")


def _lenient_int(digits: str) -> float:
    return float(digits)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _has_surrogate(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _find(data: Any, wanted: Callable[[Any], bool]) -> str | None:
    """Return the path of the first matching value or key among the first `_MAX_SEARCHED_VALUES`, or None."""
    for path, value in itertools.islice(_walk(data), _MAX_SEARCHED_VALUES):
        if wanted(value):
            return path
    return None


def _walk(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield all values and keys below `data` with their paths, in document order, lazily and without recursion."""
    stack = [_children("", data)]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            continue
        path, key, value = entry
        yield path, key
        if isinstance(value, dict | list):
            stack.append(_children(path, value))
        else:
            yield path, value


def _children(path: str, value: Any) -> Iterator[tuple[str, str | None, Any]]:
    path = path[:_MAX_PARAM_CHARS]  # a long key must not be copied into the path of each of its children
    if isinstance(value, dict):
        return ((_join(path, key), key, child) for key, child in value.items())
    if isinstance(value, list):
        return ((f"{path}[{index}]", None, child) for index, child in enumerate(value))
    return iter([(path, None, value)])


def _last_key(raw: bytes) -> str | None:
    """Return the key before an error in bytes that no parser accepts, or None where none is near."""
    head = raw[-4096:]
    colon = head.rfind(b'":')
    start = head.rfind(b'"', 0, colon) if colon > 0 else -1
    if start < 0:
        return None
    return head[start + 1 : colon].decode("utf-8", "replace")[:_MAX_PARAM_CHARS]


def from_validation(error: ValidationError) -> PagemillError:
    """Return the first of pydantic's errors as one sentence: field, expected value, given value."""
    every = error.errors(include_url=False)
    first = every[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path = f"{path}[{part}]"
        elif not _KIND.fullmatch(str(part)):
            path = _join(path, str(part))
    context: dict[str, Any] = first.get("ctx", {})
    if first["type"] == "refusal":
        return _invalid(_join(path, context["field"]), context["message"], context["code"])
    if first["type"] == "missing":
        return _invalid(path, f"`{path}` is required. Send it.", "missing_required_parameter")
    kind = "int_size" if first["type"] == "int_type" and _was_integer(first["input"]) else first["type"]
    expectation = _expectation(kind, context, first["msg"])
    if first["loc"] and _KIND.fullmatch(str(first["loc"][-1])):
        expectation = _of_any_kind([each for each in every if each["loc"][:-1] == first["loc"][:-1]])
    return _invalid(path, f"`{path}` {expectation}, got {show(first['input'])}.", "invalid_value")


def _of_any_kind(errors: Sequence[ErrorDetails]) -> str:
    """Return what one value must be that may be of several kinds."""
    wanted = dict.fromkeys(_expectation(each["type"], each.get("ctx", {}), each["msg"]) for each in errors)
    first, *others = wanted
    return " or ".join([first, *(each.removeprefix("must be ") for each in others)])


def from_refusal(error: PydanticCustomError) -> PagemillError:
    """Return the error of a `fields.refusal` that was raised outside a schema's validation."""
    context: dict[str, Any] = error.context or {}
    return _invalid(context["field"], context["message"], context["code"])


def _was_integer(value: Any) -> bool:
    """Whether a value was an integer too large for the parser, which made a float of it."""
    return isinstance(value, float) and abs(value) >= 2**63


def _expectation(kind: str, context: dict[str, Any], fallback: str) -> str:
    template = _EXPECTATIONS.get(kind)
    if template is None:
        return f"is not valid: {fallback}"
    return template.format(**{name: _in_json(value) for name, value in context.items()})


def _in_json(value: Any) -> Any:
    """Return a value of an expectation with texts in JSON's quotes."""
    return value.replace("'", '"') if isinstance(value, str) else value


def _join(path: str, field: str) -> str:
    if not path or not field or field[0] in "[.":
        return path + field
    return f"{path}.{field}"


def _invalid(param: str | None, message: str, code: str) -> PagemillError:
    cleaned = _printable(param)[:_MAX_PARAM_CHARS] if param else None
    return PagemillError(_printable(message), param=cleaned, code=code)


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
