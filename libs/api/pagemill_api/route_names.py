"""Map paths to routes for logs, metrics and traces: paths of no route must not create time series."""

from __future__ import annotations

from collections.abc import Collection

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import compile_path


class _AnyText(PathConvertor):
    """Starlette's `path` convertor, extended to line breaks, so that the dialect answers any unknown name."""

    regex = "(?s:.*)"


register_url_convertor("text", _AnyText())


class RouteNames:
    def __init__(self, routes: Collection[str]) -> None:
        """Compile the routes, which are written as in Starlette, with or without parameters."""
        self._exact = frozenset(routes)
        # Of routes with the same beginning, the longer one first: `/v2/models/{model:text}` also matches the others.
        self._patterns = [(compile_path(route)[0], route) for route in sorted(routes, reverse=True) if "{" in route]

    def find(self, path: str) -> str | None:
        """Return the route of a path, or None. A slash at the end is ignored."""
        path = path[:-1] if len(path) > 1 and path.endswith("/") else path
        if path in self._exact:
            return path
        return next((route for pattern, route in self._patterns if pattern.match(path)), None)
