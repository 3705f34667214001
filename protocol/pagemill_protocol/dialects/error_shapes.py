"""The shape of errors by path, for those that no dialect's own route answers: bodies that are too large or too slow,
methods that a route has not, paths that are none.

A path that belongs to no route has the shape of the API below whose first segment it lies (`/api`, `/v2`); below `/v1`
that of a route that it goes on from. All others have OpenAI's.
"""

from __future__ import annotations

from functools import cache

from pagemill_protocol.dialects.registry import PAGES, generating_routes
from pagemill_protocol.http.errors import ErrorBody
from pagemill_protocol.http.route_names import RouteNames
from pagemill_protocol.openai.render import error_body as openai_error_body


def error_body_at(path: str) -> ErrorBody:
    """How errors are written below `path`."""
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
    """The part of a path that says whose API it is; empty: none."""
    first, _, rest = path.removeprefix("/").partition("/")
    if first != "v1":
        return first
    second = rest.partition("/")[0]
    return f"v1/{second}" if second else ""
