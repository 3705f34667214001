"""The routes below `/ui`. The files of the page are open and say nothing of the platform; what it shows is for clients
on this machine if the gateway needs no keys, otherwise for keys with `role=admin`.

With keys, being on this machine does not suffice: behind a proxy on the same machine, every client would be.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagemill_gateway.limits.store import Use
from pagemill_gateway.routes.page.questions import read_limit, read_what_if
from pagemill_gateway.routes.page.viewers import HEADERS, EventStream, Viewers
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import not_found
from pagemill_protocol.report.scaling import KEPT_DECISIONS
from pagemill_servers.auth import is_loopback
from pagemill_servers.guard import check_host
from pagemill_servers.keys.caller import Caller, Charge
from pagemill_servers.origin import check_same_origin, forbidden, header_values
from pagemill_servers.request_middleware import read_body

PATH = "/ui"
DEFAULT_DECISIONS = 30
MAX_DECISIONS = 100
MAX_COUNTED = 500
"""The use of the limits of so many keys is shown."""
NO_STORE = {"cache-control": "no-store"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
"""No inline script or style, no `eval`, nothing of another origin, and no string that becomes HTML."""
FILE_HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
}
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


class PageFile(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def page_routes(worker: Worker) -> list[Route]:
    """Return the routes of the page."""
    page = PageRoutes(worker)
    return [
        Route(PATH, page.file),
        Route(f"{PATH}/events", page.events),
        Route(f"{PATH}/decisions", page.decisions),
        Route(f"{PATH}/scaling", page.scaling),
        Route(f"{PATH}/what-if", page.what_if),
        Route(f"{PATH}/keys", page.keys),
        Route(f"{PATH}/{{file:path}}", page.file),
    ]


class PageRoutes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._viewers: Viewers | None = None
        self._files = read_files()

    async def file(self, request: Request) -> Response:
        """Return a file of the page; only those that were read at the start exist."""
        found = self._files.get(request.path_params.get("file", "") or "index.html")
        if found is None:
            raise not_found(request.scope["path"])
        headers = {**FILE_HEADERS, "etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, media_type=found.media_type, headers=headers)

    async def events(self, request: Request) -> Any:
        """Stream the state of the fleet."""
        caller = self._viewer(request)
        if request.method == "HEAD":  # without a body, the endless stream would only occupy the connection
            return Response(headers={name.decode(): value.decode() for name, value in HEADERS})
        await read_body(request.receive)
        self._viewers = self._viewers or Viewers(self._worker.control)
        return EventStream(self._viewers, lambda: not self._worker.draining and self._may_look(caller))

    async def decisions(self, request: Request) -> Response:
        """Return the latest routing decisions, with what the choice was made by."""
        self._viewer(request)
        body = await self._worker.control.decisions(read_limit(request.query_params, DEFAULT_DECISIONS, MAX_DECISIONS))
        return Response(body, media_type="application/json", headers=NO_STORE)

    async def scaling(self, request: Request) -> Response:
        """Return the latest scaling decisions of the operator."""
        self._viewer(request)
        body = await self._worker.control.scaling(read_limit(request.query_params, DEFAULT_DECISIONS, KEPT_DECISIONS))
        return Response(body, media_type="application/json", headers=NO_STORE)

    async def what_if(self, request: Request) -> Response:
        """Return predicted latencies of other replicas, rates and lengths."""
        self._viewer(request)
        body = await self._worker.control.what_if(read_what_if(request.query_params))
        return Response(body, media_type="application/json", headers=NO_STORE)

    async def keys(self, request: Request) -> Response:
        """Return what each key may do and has used; of the keys themselves, the beginnings of their hashes."""
        self._viewer(request)
        callers = sorted(self._worker.keys.callers, key=lambda each: (each.tenant, each.key_hash))
        charges = [_charges(each) for each in callers]
        counted = sorted({each.account for own in charges[:MAX_COUNTED] for each in own})
        report = await self._worker.limiter.use(counted)
        use = dict(zip(counted, report.accounts, strict=True))
        keys = [_key(caller, own, use) for caller, own in zip(callers, charges, strict=True)]
        body = {"open": self._worker.keys.open, "is_shared": report.is_shared, "keys": keys}
        return JSONResponse(body, headers=NO_STORE)

    def _viewer(self, request: Request) -> Caller:
        """Return the caller if it may look. Raises `PagemillError` 401 or 403."""
        scope = request.scope
        check_same_origin(scope, "open the page at the gateway itself")
        caller = self._worker.keys.authenticate(scope)
        if caller.is_admin:
            return caller
        if not self._worker.keys.open:
            raise forbidden(
                "The page shows what all keys do, and this key is for using models. Add role=admin to the entry of a "
                "key for people who run the platform.",
                "not_an_admin",
            )
        check_host(scope, self._worker.config.allowed_hosts, "allowed_hosts")
        if not is_loopback(scope) or any(header_values(scope, name) for name in _FORWARDED):
            raise forbidden(
                "Without API keys, the page is shown to clients on the gateway's machine only. Open it there, or "
                "configure keys, and one with role=admin.",
                "not_on_this_machine",
            )
        return caller

    def _may_look(self, caller: Caller) -> bool:
        """Whether the key of a viewer is still accepted with its role."""
        if not caller.key_hash:
            return self._worker.keys.open
        now = self._worker.keys.by_hash(caller.key_hash)
        return now is not None and now.is_admin


def read_files() -> dict[str, PageFile]:
    """Read the page's files by their paths below `/ui/`, so that no path of a client is used."""
    found: dict[str, PageFile] = {}
    _read_folder(files("pagemill_gateway.ui") / "static", "", found)
    return found


def _read_folder(folder: Traversable, prefix: str, found: dict[str, PageFile]) -> None:
    for each in folder.iterdir():
        path = f"{prefix}{each.name}"
        if each.is_dir():
            _read_folder(each, f"{path}/", found)
        elif (media_type := TYPES.get(each.name.rpartition(".")[2])) is not None:
            content = each.read_bytes()
            found[path] = PageFile(content, media_type, f'"{sha256(content).hexdigest()[:16]}"')


def _charges(caller: Caller) -> list[Charge]:
    """Return the accounts of a key that have limits: its own, and those of models."""
    return list(caller.charges([name for name, _ in caller.model_limits]))


def _key(caller: Caller, charges: list[Charge], use: dict[str, Use]) -> dict[str, Any]:
    """Return a key with its limits; `used` is None where it was not counted."""
    return {
        "account": caller.tenant or f"key {caller.key_hash[:8]}",
        "models": sorted(caller.models) if caller.models is not None else None,
        "limits": [
            {
                "name": name,
                "model": charge.model,
                "value": value,
                "used": getattr(use[charge.account], name) if charge.account in use else None,
            }
            for charge in charges
            for name, value in charge.limits._asdict().items()
            if value is not None
        ],
        "priority": caller.priority_class,
        "objective": caller.objective,
        "is_admin": caller.is_admin,
    }
