"""`GET /runbooks/NAME`: the page of an alert, from the package. Alerts link here; reading it needs no key.

`charts/generate.py` copies the pages of `docs/runbooks`; the folder is read once, so no path of a client is used.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pagemill_protocol.errors import not_found

RUNBOOKS_PATH = "/runbooks/{name}"
PAGES = {path.stem: path.read_text("utf-8") for path in (Path(__file__).parent / "runbooks").glob("*.md")}


async def runbook(request: Request) -> Response:
    text = PAGES.get(request.path_params["name"].removesuffix(".md"))
    if text is None:
        raise not_found(request.scope["path"])
    return PlainTextResponse(text)
