"""`GET /docs`: the OpenAPI document as an HTML page, which loads nothing and runs no script."""

from __future__ import annotations

from html import escape

import orjson
from starlette.responses import Response

DOCS_PATH = "/docs"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = "body{font:16px sans-serif;max-width:50em;margin:2em auto}code{background:#eee;padding:.1em .3em}"


def docs_page(document: bytes) -> Response:
    parsed = orjson.loads(document)
    title = escape(f"{parsed['info']['title']} {parsed['info']['version']}")
    rows = "".join(
        f"<li><code>{escape(method.upper())} {escape(path)}</code>{_body_of(operation)}</li>"
        for path, methods in parsed["paths"].items()
        for method, operation in methods.items()
    )
    html = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>Fields, bounds and answers: <a href='/openapi.json'>openapi.json</a>.</p><ul>{rows}</ul>"
    )
    return Response(html, media_type="text/html", headers={"content-security-policy": _POLICY})


def _body_of(operation: dict[str, object]) -> str:
    body = operation.get("requestBody")
    if not isinstance(body, dict):
        return ""
    if "application/json" not in body["content"]:
        return f": a body of {escape(next(iter(body['content'])))}"
    name = str(body["content"]["application/json"]["schema"]["$ref"]).rpartition("/")[2]
    return f": a JSON body, {escape(name)}"
