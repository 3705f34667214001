"""Every failure of an HTTP app as a body in OpenAI's shape.

`install_error_handlers` covers what an app raises: our own errors, unknown routes and methods, and bugs, whose
text stays in the log. `door` covers what happens around the app.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagemill_protocol.errors import PagemillError, internal_error, not_found

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


def error_response(error: PagemillError, headers: dict[str, str] | None = None) -> Response:
    """The response of one error, with its `Retry-After`."""
    return Response(
        orjson.dumps(error.body()),
        status_code=error.status,
        headers={**error.headers(), **(headers or {})},
        media_type="application/json",
    )


def with_errors(
    error_body: Callable[[PagemillError], bytes], route: Callable[[Request], Awaitable[Answer]]
) -> Callable[[Request], Awaitable[Answer | Response]]:
    """The route with errors in a shape of its own."""

    async def shaped(request: Request) -> Answer | Response:
        try:
            return await route(request)
        except PagemillError as error:
            return Response(
                error_body(error), status_code=error.status, headers=error.headers(), media_type="application/json"
            )

    return shaped


def method_not_allowed(method: str, path: str) -> PagemillError:
    return PagemillError(
        f"The route `{path[:200]}` does not answer {method[:20]}.", status=405, code="method_not_allowed"
    )


def install_error_handlers(app: Starlette) -> None:
    """Register handlers for everything `app` can raise.

    `door` removes a slash at the end of a path; there is no redirect, which would lead where the Host header says.
    """
    app.router.redirect_slashes = False
    app.add_exception_handler(PagemillError, _on_pagemill_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


async def _on_pagemill_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PagemillError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # `request.url` is made with the Host header, which may be no host at all
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(not_found(path), headers)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return error_response(method_not_allowed(request.method, path), headers)
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return error_response(PagemillError(str(error.detail)[:500], status=error.status_code, type=kind), headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this response; `door` logs it there."""
    return error_response(internal_error())
