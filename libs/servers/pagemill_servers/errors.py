"""Render every failure of an HTTP app as an error body in the shape of its path's dialect, by default OpenAI's.

`install_error_handlers` covers what an app raises: `PagemillError`, unknown routes and methods, and bugs, whose text
stays in the log. `request_middleware` covers what happens around the app.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from pagemill_protocol.errors import ErrorBody, PagemillError, internal_error, not_found
from pagemill_protocol.errors import error_body as openai_error_body

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


def openai_shape(path: str) -> ErrorBody:
    return openai_error_body


def note_error(scope: Scope, error: PagemillError) -> None:
    """Keep the error that ends a request, for the log line and the metrics of `noted_error`."""
    scope.setdefault("state", {})["error"] = error


def noted_error(scope: Scope) -> PagemillError | None:
    error: PagemillError | None = scope.get("state", {}).get("error")
    return error


def error_response(
    error: PagemillError, headers: dict[str, str] | None = None, error_body: ErrorBody = openai_error_body
) -> Response:
    """Return the response of one error, with its `Retry-After`."""
    return Response(
        error_body(error),
        status_code=error.status,
        headers={**error.headers(), **(headers or {})},
        media_type="application/json",
    )


def with_errors(
    error_body: ErrorBody, route: Callable[[Request], Awaitable[Answer]]
) -> Callable[[Request], Awaitable[Answer | Response]]:
    """Wrap a route so that its errors have a shape of their own."""

    async def shaped(request: Request) -> Answer | Response:
        try:
            return await route(request)
        except PagemillError as error:
            note_error(request.scope, error)
            return error_response(error, error_body=error_body)

    return shaped


def method_not_allowed(method: str, path: str) -> PagemillError:
    return PagemillError(
        f"The route `{path[:200]}` does not answer {method[:20]}.", status=405, code="method_not_allowed"
    )


def install_error_handlers(app: Starlette, error_body_at: Callable[[str], ErrorBody] = openai_shape) -> None:
    """Register handlers for everything that `app` can raise.

    `error_body_at`: returns the function that renders errors at a path. `request_middleware` removes a slash at the
    end of a path; the app does not redirect, since the target would depend on the Host header.
    """
    app.router.redirect_slashes = False
    app.add_exception_handler(PagemillError, partial(_on_pagemill_error, error_body_at))
    app.add_exception_handler(HTTPException, partial(_on_http_exception, error_body_at))
    app.add_exception_handler(Exception, partial(_on_bug, error_body_at))


async def _on_pagemill_error(error_body_at: Callable[[str], ErrorBody], request: Request, error: Exception) -> Response:
    assert isinstance(error, PagemillError)
    return _noted(error_body_at, request, error)


async def _on_http_exception(error_body_at: Callable[[str], ErrorBody], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # `request.url` contains the Host header, which may not be a valid host
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _noted(error_body_at, request, not_found(path), headers)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods(request))
        return _noted(error_body_at, request, method_not_allowed(request.method, path), headers)
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    shown = PagemillError(str(error.detail)[:500], status=error.status_code, type=kind)
    return _noted(error_body_at, request, shown, headers)


def _noted(
    error_body_at: Callable[[str], ErrorBody],
    request: Request,
    error: PagemillError,
    headers: dict[str, str] | None = None,
) -> Response:
    note_error(request.scope, error)
    return error_response(error, headers, error_body_at(request.scope["path"]))


def _methods(request: Request) -> list[str]:
    """Return the methods of all routes with the path; the framework names only those of the first one."""
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


async def _on_bug(error_body_at: Callable[[str], ErrorBody], request: Request, error: Exception) -> Response:
    """Return a 500. Starlette raises the error again after this response, and `request_middleware` logs it."""
    return _noted(error_body_at, request, internal_error())
