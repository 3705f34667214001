"""One long `GET /internal/state` per endpoint, reopened for ever; its frames go to the brain.

A broken, silent or gapped stream is closed and opened again (its first frame is a snapshot) after a jittered, growing
pause; meanwhile the endpoint's `/readyz` gives the reason. The pause never stops traffic: the brain decides what a
missing stream means for routing. Tokenizer bundles named by a frame are fetched before the frame is applied, so that no
endpoint is usable before its prompts can be tokenized. An engine that drains gets a confirmation once no more requests
go there (`discovery.handover`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import secrets
import socket
from contextlib import suppress

import aiohttp
import msgspec

from pagemill_gateway.brain.brain import LocalBrain
from pagemill_gateway.brain.endpoints.reports import StateGap
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.discovery.bundles import BundleError, Bundles
from pagemill_gateway.discovery.handover import Handovers
from pagemill_protocol.bounded import TooLarge, read_bounded
from pagemill_protocol.frames import FrameError, StateDecoder
from pagemill_protocol.state import GATEWAY_HEADER, StateFrame
from pagemill_protocol.versions import UnsupportedProtocol, check_peer, protocol_headers

logger = logging.getLogger("pagemill.gateway.state")

LONG_FAILING_SHARE = 0.1
LONGEST_PAUSE_S = 30.0
"""Longest pause for an endpoint that has failed for long; its platform shows when it is worth trying again."""
STREAM_FAULTS = (aiohttp.ClientError, TimeoutError, OSError, FrameError, StateGap, BundleError, UnsupportedProtocol)
READYZ_TIMEOUT_S = 1.0
READYZ_MAX_BYTES = 64 * 1024
WRONG_TOKEN = "/internal/state answered 401: the engine does not accept the token; set engine_token to one that it does"


class StateStreams:
    def __init__(
        self, session: aiohttp.ClientSession, brain: LocalBrain, bundles: Bundles, config: GatewayConfig
    ) -> None:
        self._session = session
        self._brain = brain
        self._bundles = bundles
        self._config = config
        name = f"{socket.gethostname()}-{secrets.token_hex(8)}"
        self._gateway = {GATEWAY_HEADER.decode(): name, **protocol_headers()}
        self._handovers = Handovers(session, brain, config.handover_timeout_s, self._gateway)
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._asked: set[str] = set()
        """Endpoints that have answered, or failed to, at least once."""
        self._probed_ready: set[str] = set()
        self._hints: dict[str, asyncio.Event] = {}
        """By endpoint: set when it should be tried again at once."""

    def sync(self) -> None:
        """Follow exactly the endpoints that the brain knows now."""
        records = self._brain.registry.endpoints.values()
        wanted = {(record.endpoint.id, record.endpoint.control_url) for record in records}
        for gone in self._tasks.keys() - wanted:
            self._tasks.pop(gone).cancel()
        self._asked &= {endpoint_id for endpoint_id, _ in wanted}
        self._hint({record.endpoint.id for record in records if record.endpoint.probed_ready})
        for endpoint_id, control_url in wanted - self._tasks.keys():
            self._hints[endpoint_id] = asyncio.Event()
            self._brain.awaiting_first_report(endpoint_id)
            follower = self._follow(endpoint_id, control_url)
            self._tasks[endpoint_id, control_url] = asyncio.create_task(follower, name=f"state:{endpoint_id}")

    @property
    def settled(self) -> bool:
        """Every engine that its platform calls ready has reported here, or was asked without success."""
        return self._probed_ready <= self._asked

    def _hint(self, probed_ready: set[str]) -> None:
        """Endpoints that the platform has just found ready are tried at once."""
        for endpoint_id in probed_ready - self._probed_ready:
            if endpoint_id in self._hints:
                self._hints[endpoint_id].set()
        self._probed_ready = probed_ready
        self._hints = {key[0]: self._hints[key[0]] for key in self._tasks}

    async def close(self) -> None:
        await self._handovers.close()
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, endpoint_id: str, control_url: str) -> None:
        loop = asyncio.get_running_loop()
        pause_s, failing_since = self._config.reconnect_base_s, loop.time()
        while True:
            connection = _Connection()
            try:
                await self._read(endpoint_id, control_url, connection)
                cause = "the stream ended"
            except STREAM_FAULTS as error:
                connection.refused = is_refused(error)
                cause = f"{type(error).__name__}: {error}"
                if fault := tls_fault(error):
                    cause = fault
                    logger.warning("state stream of %s: %s", endpoint_id, fault)
            except Exception as error:
                # An unexpected error in one stream must neither end it for good nor affect another one.
                logger.exception("state stream of %s failed", endpoint_id)
                cause = f"{type(error).__name__}: {error}"
            if connection.num_frames:
                level = logging.INFO if self._brain.leaving(endpoint_id) else logging.WARNING
                logger.log(level, "state stream of %s lost: %s", endpoint_id, cause)
                pause_s, failing_since = self._config.reconnect_base_s, loop.time()
            self._asked.add(endpoint_id)
            self._brain.stream_lost(endpoint_id)
            if connection.refused:
                self._brain.unreachable(endpoint_id)
            if connection.opened:
                self._brain.note_phase(endpoint_id, *await fetch_phase(self._session, control_url, cause))
            else:
                self._brain.note_phase(endpoint_id, "unreachable", cause)
            await self._pause(endpoint_id, pause_s * random.uniform(0.5, 1.0))
            longest_s = max(self._config.reconnect_max_s, (loop.time() - failing_since) * LONG_FAILING_SHARE)
            pause_s = min(longest_s, LONGEST_PAUSE_S, pause_s * 2)

    async def _pause(self, endpoint_id: str, pause_s: float) -> None:
        hint = self._hints[endpoint_id]
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await hint.wait()
        hint.clear()

    async def _read(self, endpoint_id: str, control_url: str, connection: _Connection) -> None:
        """One connection, until it ends. Raises one of `STREAM_FAULTS` unless the stream ends regularly."""
        record = self._brain.registry.endpoints.get(endpoint_id)
        token = self._brain.token_of(record) if record is not None else ""
        timeout = aiohttp.ClientTimeout(
            total=None, connect=self._config.connect_timeout_s, sock_read=self._config.state_idle_timeout_s
        )
        async with self._session.get(
            f"{control_url}/internal/state",
            headers={"Authorization": f"Bearer {token}", **self._gateway},
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            connection.opened = True
            if response.status == 401:
                raise aiohttp.ClientPayloadError(WRONG_TOKEN)
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"/internal/state answered {response.status}")
            check_peer("The engine", response.headers)
            decoder = StateDecoder()
            while data := await response.content.readany():
                for frame in decoder.feed(data):
                    await self._ensure_bundle(frame, control_url, token)
                    self._brain.observe(endpoint_id, frame)
                    connection.num_frames += 1
                    self._asked.add(endpoint_id)
                    if frame.draining:
                        self._handovers.begin(endpoint_id, control_url, token)
                if not self._brain.ready(endpoint_id):
                    self._brain.note_phase(endpoint_id, *await fetch_phase(self._session, control_url, "starting"))
            decoder.close()

    async def _ensure_bundle(self, frame: StateFrame, control_url: str, token: str) -> None:
        digest = frame.digests.tokenizer_bundle
        if digest and digest not in self._bundles:
            await self._bundles.fetch(digest, control_url, token)


class _Connection:
    """Kept beyond the exception that ends a connection."""

    num_frames = 0
    opened = False
    refused = False
    """No process listens there."""


class _Readyz(msgspec.Struct):
    phase: str = ""
    detail: str = ""


async def fetch_phase(session: aiohttp.ClientSession, control_url: str, otherwise: str) -> tuple[str, str]:
    """`(phase, detail)`, such as `("loading", "weights 40 %")`; `("unreachable", otherwise)` without an answer."""
    timeout = aiohttp.ClientTimeout(total=READYZ_TIMEOUT_S)
    try:
        async with session.get(f"{control_url}/readyz", timeout=timeout, allow_redirects=False) as response:
            answer = msgspec.json.decode(await read_bounded(response, READYZ_MAX_BYTES), type=_Readyz)
    except (aiohttp.ClientError, TimeoutError, OSError, TooLarge, msgspec.DecodeError, UnicodeDecodeError):
        return "unreachable", otherwise
    return answer.phase[:100] or "not ready", answer.detail[:300] or otherwise


def tls_fault(error: BaseException) -> str:
    """What is wrong between the certificate of an engine and the settings, and the remedy; empty for other faults."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            f"{getattr(error.certificate_error, 'verify_message', '')}: the engine's certificate is not accepted; set "
            "engine_tls.ca_file to its authority, and engine_tls.server_name to a name in it"
        )
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"no TLS at {error.host}:{error.port}: its URL begins with https, so set tls of the engine"
    return ""


def is_refused(error: BaseException) -> bool:
    """Whether no process listens on the port: the request was not begun and nothing is lost."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED
