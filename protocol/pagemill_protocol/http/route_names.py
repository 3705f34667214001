"""The route of a path, for logs, metrics and traces: paths that belong to none must not create series."""

from __future__ import annotations

from collections.abc import Collection

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import compile_path


class _AnyText(PathConvertor):
    """As Starlette's `path`, with line breaks: an unknown name is answered as its dialect does, whatever is in it."""

    regex = "(?s:.*)"


register_url_convertor("text", _AnyText())


class RouteNames:
    def __init__(self, routes: Collection[str]) -> None:
        """`routes`: as Starlette writes them, with or without parameters."""
        self._exact = frozenset(routes)
        # Of routes with the same beginning, the longer ones first: `/v2/models/{model:text}` matches the others too.
        self._patterns = [(compile_path(route)[0], route) for route in sorted(routes, reverse=True) if "{" in route]

    def find(self, path: str) -> str | None:
        """`None`: of no route. A slash at the end does not count."""
        path = path[:-1] if len(path) > 1 and path.endswith("/") else path
        if path in self._exact:
            return path
        return next((route for pattern, route in self._patterns if pattern.match(path)), None)
