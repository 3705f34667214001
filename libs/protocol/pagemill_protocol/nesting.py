"""The limit of nesting for all JSON from clients: request bodies, lines of batches, and JSON inside of strings.

It is far below the limits of everything behind it: the parser takes 1,024 levels, the renderers and pydantic about 254,
and chat templates and compilers of grammars about as many. So what is accepted can be translated, prepared and rendered
again. `openai.parse` checks each body before any schema sees it; whatever decodes JSON text that is a value of a body
calls this as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from pagemill_protocol.errors import PagemillError

MAX_LEVELS = 100
"""Maximum number of objects and lists around one value. The largest schemas of tools have about 20."""
CODE = "nested_too_deeply"
MAX_PATH_CHARS = 200
MAX_SCANNED_BYTES = 256 * 1024
"""How far a text that no parser takes is searched for the path."""
MAX_SEARCHED_CONTAINERS = 200_000
"""How many objects and lists are searched for the path."""
_CONTAINERS = frozenset((dict, list))
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def may_exceed(raw: bytes) -> bool:
    """Return whether JSON text has enough brackets for more than `MAX_LEVELS` levels. Most bodies have not."""
    return raw.count(b"[") + raw.count(b"{") > MAX_LEVELS


def exceeds(value: Any, max_levels: int = MAX_LEVELS) -> bool:
    """Return whether a parsed value has more levels than allowed."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(max_levels):
        if not level:
            return False
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each)
            if type(child) in _CONTAINERS
        ]
    return bool(level)


def text_exceeds(text: str) -> bool:
    """Return whether text that may be JSON has more levels than allowed."""
    raw = text.encode("utf-8", "replace")
    if not may_exceed(raw):
        return False
    try:
        return exceeds(orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        return "depth" in str(error)


def check_value(value: Any, max_levels: int = MAX_LEVELS) -> None:
    """Raise `PagemillError` 400 that names the path of the first value nested too deeply."""
    if exceeds(value, max_levels):
        raise nested_too_deeply(_path_in(value, max_levels), max_levels)


def nested_too_deeply(path: str, max_levels: int = MAX_LEVELS) -> PagemillError:
    path = path.encode("utf-8", "replace").decode()[:MAX_PATH_CHARS]
    subject = f"`{path}` is" if path else "The request body is"
    return PagemillError(
        f"{subject} nested more than {max_levels} levels deep. Use fewer levels.",
        param=path or None,
        code=CODE,
    )


def path_in_text(raw: bytes) -> str:
    """Return the path of the first value beyond the limit in text that is valid so far; "" if it is far away."""
    opened = bytearray()
    for match in _STRING_OR_BRACKET.finditer(raw[:MAX_SCANNED_BYTES]):
        bracket = raw[match.start()]
        if bracket in b"]}":
            del opened[-1:]
        elif bracket in b"[{":
            if len(opened) == MAX_LEVELS:
                closing = bytes(reversed(opened)).translate(bytes.maketrans(b"[{", b"]}"))
                return _last_path(orjson.loads(raw[: match.start()] + b"null" + closing))
            opened.append(bracket)
    return ""


def _path_in(value: Any, max_levels: int) -> str:
    """Return the path of the first value, in the text's order, that is more than `max_levels` deep."""
    stack = [_containers(value)]
    path: list[str] = []
    num_left = MAX_SEARCHED_CONTAINERS
    while stack and num_left:
        num_left -= 1
        found = next(stack[-1], None)
        if found is None:
            stack.pop()
            del path[-1:]
            continue
        part, child = found
        path.append(part)
        if len(stack) == max_levels:
            return "".join(path).removeprefix(".")
        stack.append(_containers(child))
    return ""


def _containers(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is dict:
        return ((f".{name[:MAX_PATH_CHARS]}", each) for name, each in value.items() if type(each) in _CONTAINERS)
    return ((f"[{index}]", each) for index, each in enumerate(value) if type(each) in _CONTAINERS)


def _last_path(value: Any) -> str:
    path = ""
    while value and len(path) < MAX_PATH_CHARS:
        if isinstance(value, list):
            path, value = f"{path}[{len(value) - 1}]", value[-1]
        elif isinstance(value, dict):
            name = next(reversed(value))
            path, value = f"{path}.{name}" if path else name, value[name]
        else:
            break
    return path
