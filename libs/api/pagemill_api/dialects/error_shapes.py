"""The error shape of a path, for errors outside the dialects' own routes: bodies that are too large or too slow,
unsupported methods, unknown paths.

A path without a route has the error shape of the API with the same first segment (`/api`, `/v2`); below `/v1`, that of
the route that it extends. All others have OpenAI's shape.
"""

from __future__ import annotations

from functools import cache

from pagemill_api.dialects.registry import PAGES, generating_routes
from pagemill_api.route_names import RouteNames
from pagemill_protocol.errors import ErrorBody
from pagemill_protocol.errors import error_body as openai_error_body


def error_body_at(path: str) -> ErrorBody:
    """Return the function that renders errors below `path`."""
    names, shapes, folders = _tables()
    found = names.find(path)
    return shapes[found] if found is not None else folders.get(_folder(path), openai_error_body)


@cache
def _tables() -> tuple[RouteNames, dict[str, ErrorBody], dict[str, ErrorBody]]:
    shapes: dict[str, ErrorBody] = {path: each.error_body for path, each in generating_routes().items()}
    shapes |= {each.path: each.error_body for each in PAGES}
    folders = {_folder(path): shape for path, shape in shapes.items() if _folder(path)}
    return RouteNames(shapes), shapes, folders


def _folder(path: str) -> str:
    """Return the prefix of a path that identifies its API, or an empty text."""
    first, _, rest = path.removeprefix("/").partition("/")
    if first != "v1":
        return first
    second = rest.partition("/")[0]
    return f"v1/{second}" if second else ""
