"""Run the plain programs of chat templates (`plain_program`), with the same text as the template itself or none.

A program takes time in proportion to the messages and reads nothing but its variables, so it needs no separate process.
If a value is unusual, for example a content that is not text, no text is returned, and the template is run as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Variables = Mapping[str, Any]
GLOBALS = frozenset(
    {"range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now", "loop"}
)
"""Names that are not variables in templates."""
_DICT_FIELDS = frozenset(dir(dict))
"""Attributes of every dict: a template that names one may mean the dict's method."""


class _Undefined:
    """The value of a missing variable or key."""

    def __bool__(self) -> bool:
        return False


_UNDEFINED = _Undefined()


class NeedsTemplateProcess(Exception):
    """The template itself has to be run with these variables."""


Statement = Callable[["_Frame"], None]
Expression = Callable[["_Frame"], Any]


class _Frame:
    """The state of one run."""

    __slots__ = ("index", "item", "item_name", "max_chars", "num_chars", "pieces", "variables")

    def __init__(self, variables: Variables, max_chars: int) -> None:
        self.variables = variables
        self.max_chars = max_chars
        self.num_chars = 0
        self.pieces: list[str] = []
        self.item: Any = None
        self.item_name = ""
        self.index = 0

    def put(self, text: str) -> None:
        self.num_chars += len(text)
        if self.num_chars > self.max_chars:
            raise NeedsTemplateProcess
        self.pieces.append(text)


class PlainTemplate:
    def __init__(self, program: list[Any], max_output_chars: int) -> None:
        """Compile a program. Raises `ValueError` for anything that is not a program."""
        try:
            self._statements = _statements(program)
        except (TypeError, IndexError, KeyError, RecursionError) as error:
            raise ValueError(f"no plain program: {error!r}") from error
        self._max_output_chars = max_output_chars

    def render(self, variables: Variables) -> str | None:
        """Return the text, or None: the template has to be run as it is."""
        frame = _Frame(variables, self._max_output_chars)
        try:
            for statement in self._statements:
                statement(frame)
        except NeedsTemplateProcess:
            return None
        return "".join(frame.pieces)


def _statements(program: list[Any]) -> list[Statement]:
    return [_STATEMENTS[word](*arguments) for word, *arguments in program]


def _text(text: str) -> Statement:
    return lambda frame: frame.put(text)


def _out(expression: list[Any]) -> Statement:
    value_of = _expression(expression)

    def run(frame: _Frame) -> None:
        frame.put(_as_text(value_of(frame)))

    return run


def _if(test: list[Any], body: list[Any], otherwise: list[Any]) -> Statement:
    test_of, branches = _expression(test), (_statements(otherwise), _statements(body))

    def run(frame: _Frame) -> None:
        for statement in branches[bool(test_of(frame))]:
            statement(frame)

    return run


def _for(name: str, body: list[Any]) -> Statement:
    statements = _statements(body)

    def run(frame: _Frame) -> None:
        messages = frame.variables.get("messages")
        if not isinstance(messages, list):
            raise NeedsTemplateProcess
        frame.item_name = name
        for frame.index, frame.item in enumerate(messages):
            for statement in statements:
                statement(frame)
        frame.item_name = ""

    return run


def _expression(expression: list[Any]) -> Expression:
    word, *arguments = expression
    return _EXPRESSIONS[word](*arguments)


def _const(value: Any) -> Expression:
    return lambda frame: value


def _name(name: str) -> Expression:
    if name in GLOBALS:
        raise KeyError(name)

    def value_of(frame: _Frame) -> Any:
        return frame.item if name == frame.item_name else frame.variables.get(name, _UNDEFINED)

    return value_of


def _key(of: list[Any], key: str) -> Expression:
    if key in _DICT_FIELDS:
        raise KeyError(key)
    owner_of = _expression(of)

    def value_of(frame: _Frame) -> Any:
        owner = owner_of(frame)
        if type(owner) is not dict:
            raise NeedsTemplateProcess
        return owner.get(key, _UNDEFINED)

    return value_of


def _item(of: list[Any], index: int) -> Expression:
    owner_of = _expression(of)

    def value_of(frame: _Frame) -> Any:
        owner = owner_of(frame)
        if type(owner) is not list or not -len(owner) <= index < len(owner):
            raise NeedsTemplateProcess
        return owner[index]

    return value_of


def _loop(field: str) -> Expression:
    return {
        "first": lambda frame: frame.index == 0,
        "last": lambda frame: frame.index == len(frame.variables["messages"]) - 1,
        "index": lambda frame: frame.index + 1,
        "index0": lambda frame: frame.index,
    }[field]


def _add(*parts: list[Any]) -> Expression:
    values_of = [_expression(each) for each in parts]

    def value_of(frame: _Frame) -> str:
        texts = [_as_text(each(frame)) for each in values_of]
        if sum(map(len, texts)) > frame.max_chars:
            raise NeedsTemplateProcess
        return "".join(texts)

    return value_of


def _and(left: list[Any], right: list[Any]) -> Expression:
    first, second = _expression(left), _expression(right)
    return lambda frame: first(frame) and second(frame)


def _or(left: list[Any], right: list[Any]) -> Expression:
    first, second = _expression(left), _expression(right)
    return lambda frame: first(frame) or second(frame)


def _not(of: list[Any]) -> Expression:
    value_of = _expression(of)
    return lambda frame: not value_of(frame)


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "lt": lambda left, right: left < right,
    "gt": lambda left, right: left > right,
    "lteq": lambda left, right: left <= right,
    "gteq": lambda left, right: left >= right,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def _compare(operator: str, left: list[Any], right: list[Any]) -> Expression:
    first, second, compare = _expression(left), _expression(right), _COMPARISONS[operator]
    is_equality = operator in ("eq", "ne")
    types = (str,) if operator in ("in", "notin") else (str, int)

    def value_of(frame: _Frame) -> bool:
        one, other = first(frame), second(frame)
        if is_equality:
            if not (_is_simple(one) and _is_simple(other)):
                raise NeedsTemplateProcess
        elif type(one) is not type(other) or type(one) not in types:
            raise NeedsTemplateProcess
        return compare(one, other)

    return value_of


def _is(test: str, of: list[Any]) -> Expression:
    value_of = _expression(of)
    return {
        "defined": lambda frame: value_of(frame) is not _UNDEFINED,
        "undefined": lambda frame: value_of(frame) is _UNDEFINED,
        "none": lambda frame: value_of(frame) is None,
        "string": lambda frame: isinstance(value_of(frame), str),
    }[test]


def _trim(of: list[Any]) -> Expression:
    value_of = _expression(of)
    return lambda frame: _as_text(value_of(frame)).strip()


def _is_simple(value: Any) -> bool:
    return value is None or type(value) in (str, bool, int)


def _as_text(value: Any) -> str:
    if type(value) is not str:
        raise NeedsTemplateProcess
    return value


_STATEMENTS: dict[str, Callable[..., Statement]] = {"text": _text, "out": _out, "if": _if, "for": _for}
_EXPRESSIONS: dict[str, Callable[..., Expression]] = {
    "const": _const,
    "name": _name,
    "key": _key,
    "item": _item,
    "loop": _loop,
    "add": _add,
    "and": _and,
    "or": _or,
    "not": _not,
    "compare": _compare,
    "is": _is,
    "trim": _trim,
}
