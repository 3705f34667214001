"""The gateway process of this machine: it starts at once and gets the catalogue after every change of endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

import aiohttp
import msgspec

from pagemill_operator.backends.base import Event
from pagemill_operator.backends.local.ports import port_or_free_one
from pagemill_operator.backends.local.settings import LocalSettings
from pagemill_operator.backends.local.state_dir import StateDir
from pagemill_operator.backends.local.supervisor import Launch, Supervisor
from pagemill_operator.plan.types import Probe
from pagemill_protocol.catalog import Catalog, Endpoint
from pagemill_protocol.engine_ports import CONTROL_PORT
from pagemill_protocol.versions import protocol_headers

LOOPBACK = "127.0.0.1"
NAME = "gateway"
TIMEOUT = aiohttp.ClientTimeout(total=5.0)
RETRY_FIRST_S = 0.2
RETRY_LONGEST_S = 10.0
"""Longest pause in seconds before a catalogue is sent again; the pause doubles each time."""
PERMANENT_STATUSES = frozenset(range(400, 500)) - {408, 429}
"""HTTP statuses that do not change if the same catalogue is sent again."""
READINESS = Probe(CONTROL_PORT, "/readyz", 2.0, 2)
LIVENESS = Probe(CONTROL_PORT, "/livez", 5.0, 6)


class LocalGateway:
    def __init__(
        self,
        port: int,
        *,
        settings: LocalSettings,
        state_dir: StateDir,
        session: aiohttp.ClientSession,
        on_change: Callable[[], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self.base_url = f"http://{_host_in_url(settings.host)}:{port}"
        self._port = port
        self._control_port: int | None = None
        """The control port stays the same after a restart, because users were shown it."""
        self._settings = settings
        self._state_dir = state_dir
        self._session = session
        self.token = secrets.token_urlsafe(32)
        """The token of the gateway's control port."""
        self.token_path = state_dir.write_token(f"{NAME}.token", self.token)
        """The file with the token; the gateway reads it, and so do users who query its control port."""
        self._wanted = Catalog()
        self._sent: tuple[int | None, Catalog] | None = None
        """The process that has received a catalogue, and that catalogue."""
        self._refused: tuple[int | None, Catalog] | None = None
        """The process that has refused a catalogue for good, and that catalogue."""
        self._reported_refusal = ""
        self._sent_changed = asyncio.Condition()
        self._changed = asyncio.Event()
        self._on_change = on_change
        self.supervisor = Supervisor(
            NAME,
            self._prepare,
            readiness=READINESS,
            liveness=LIVENESS,
            settings=settings,
            state_dir=state_dir,
            session=session,
            on_change=self._wake,
            on_event=on_event,
        )
        self._sender = asyncio.create_task(self._keep_sending(), name="catalogue")

    @property
    def ready(self) -> bool:
        return self.supervisor.phase == "ready"

    @property
    def message(self) -> str:
        """Description of the gateway process while it is not ready, with what it last reported or how it ended."""
        return f"the gateway is not ready: {self.supervisor.message}"

    @property
    def control_url(self) -> str | None:
        """URL of `/status` and `/metrics`; None while the gateway does not answer."""
        return self.supervisor.launch.control_url if self.supervisor.launch else None

    def want(self, catalog: Catalog) -> None:
        """Set the catalogue that the gateway should serve."""
        if catalog != self._wanted:
            self._wanted = catalog
            self._changed.set()

    def has(self, endpoint: Endpoint) -> bool:
        """Whether the running process got a catalogue with this endpoint as it is now."""
        if self._sent is None or self._sent[0] != self.supervisor.pid:
            return False
        return any(endpoint in model.endpoints for model in self._sent[1].models)

    async def informed(self, timeout_s: float) -> bool:
        """Wait until the gateway has the wanted catalogue; return False if that took longer than `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._sent_changed:
                await self._sent_changed.wait_for(self._up_to_date)
        return self._up_to_date()

    async def end(self, timeout_s: float) -> None:
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        await self.supervisor.end(timeout_s)

    def _prepare(self) -> Launch:
        control_port = self._control_port = port_or_free_one(self._control_port, LOOPBACK)
        content: dict[str, object] = {
            "host": self._settings.host,
            "port": self._port,
            "allowed_hosts": list(self._settings.allowed_hosts),
            "workers": self._settings.gateway_workers,
            "control_host": LOOPBACK,
            "control_port": control_port,
            "control_token_file": str(self.token_path),
            # Open streams get their error event before this process is killed.
            "drain_timeout_s": self._settings.stop_timeout_s / 2,
            "api_keys": list(self._settings.api_keys),
            "stored_responses": {},
        }
        if self._settings.batches_directory is not None:
            content["batches"] = {"directory": str(self._settings.batches_directory.absolute())}
        if self._settings.api_keys_file is not None:
            content["api_keys_file"] = str(self._settings.api_keys_file.absolute())
        path = self._state_dir.write_json(f"{NAME}.json", content)
        return Launch(
            command=(self._settings.python, "-m", self._settings.gateway_module, "--settings", str(path)),
            environment=dict(self._settings.environment),
            data_url=self.base_url,
            control_url=f"http://{LOOPBACK}:{control_port}",
        )

    def _wake(self) -> None:
        self._changed.set()
        self._on_change()

    def _up_to_date(self) -> bool:
        return self._sent == (self.supervisor.pid, self._wanted)

    async def _keep_sending(self) -> None:
        """Send the wanted catalogue to the running gateway, and again after each restart."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            pause_s = RETRY_FIRST_S
            while self.supervisor.launch is not None and not self._settled():
                if await self._send():
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), pause_s)
                self._changed.clear()
                pause_s = min(RETRY_LONGEST_S, pause_s * 2)

    def _settled(self) -> bool:
        """Whether this process has the catalogue or has refused it for good."""
        return self._up_to_date() or self._refused == (self.supervisor.pid, self._wanted)

    async def _send(self) -> bool:
        launch, pid, catalog = self.supervisor.launch, self.supervisor.pid, self._wanted
        if launch is None:
            return False
        body = msgspec.json.encode(catalog)
        headers = self._headers() | {"Content-Type": "application/json", **protocol_headers()}
        try:
            url = f"{launch.control_url}/catalog"
            async with self._session.put(url, data=body, headers=headers, timeout=TIMEOUT) as response:
                if response.status >= 300:
                    self._report_refusal(response.status, await response.content.read(500))
                    if response.status in PERMANENT_STATUSES:
                        self._refused = (pid, catalog)
                    return False
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        self._reported_refusal = ""
        async with self._sent_changed:
            self._sent = (pid, catalog)
            self._sent_changed.notify_all()
        self._on_change()
        return True

    def _report_refusal(self, status: int, body: bytes) -> None:
        """Report a refused catalogue once, however often it is tried."""
        message = (
            f"refused the new catalogue with {status} and serves the previous one: {body.decode(errors='replace')}"
        )
        if message != self._reported_refusal:
            self._reported_refusal = message
            self.supervisor.warn(message)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", **protocol_headers()}


def _host_in_url(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return LOOPBACK
    return f"[{host}]" if ":" in host else host
