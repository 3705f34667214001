"""Reads the state stream of each endpoint, a long `GET /internal/state`, and passes its frames to the brain.

A stream that is broken, silent or has a gap is closed and reopened after a growing pause with jitter; its first frame
is a snapshot. Meanwhile the endpoint's `/readyz` gives the reason. The brain decides what a missing stream means for
routing. Tokenizer bundles are fetched before the frame that names them is applied, so that prompts for a usable
endpoint can be tokenized. A draining engine gets a confirmation when no more requests are sent to it
(`discovery.handover`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import ssl
from contextlib import suppress
from functools import partial
from http import HTTPStatus

import aiohttp
import msgspec

from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.discovery.bundles import BundleError, Bundles
from pagemill_gateway.discovery.handover import DrainAcknowledgements
from pagemill_gateway.discovery.state_connection import StateConnection
from pagemill_gateway.discovery.state_sockets import StateConnector, StateSockets
from pagemill_gateway.engine_http.connecting import CannotConnect, Origin, origin_of, request_head
from pagemill_protocol.frames import FrameError
from pagemill_protocol.peer_body import TooLarge, read_bounded
from pagemill_protocol.report.state import GATEWAY_HEADER, StateFrame
from pagemill_protocol.versions import PROTOCOL_HEADER, UnsupportedProtocol, check_peer, protocol_headers
from pagemill_routing.brain.endpoints.reports import StateGap
from pagemill_routing.brain.observing import Observer

logger = logging.getLogger("pagemill.gateway.state")

LONG_FAILING_SHARE = 0.1
LONGEST_PAUSE_S = 30.0
"""The longest pause, for an endpoint that has failed for long; it ends early when the platform finds the pod ready."""


class StreamRefused(Exception):
    """The engine, or another server at its address, refused the state stream."""


OUR_FAULTS = (StreamRefused, FrameError, StateGap, BundleError, UnsupportedProtocol)
"""Faults whose text is a sentence."""
STREAM_FAULTS = (
    CannotConnect,
    StreamRefused,
    OSError,  # including timeouts
    FrameError,
    StateGap,
    BundleError,
    aiohttp.ClientError,  # while fetching a bundle
    UnsupportedProtocol,
)
READYZ_TIMEOUT_S = 1.0
READYZ_MAX_BYTES = 64 * 1024
MAX_DETAIL_CHARS = 300
SILENT_S = 5.0
"""After this time the log says that an engine cannot be reached; one that starts usually takes less."""
WRONG_TOKEN = "/internal/state answered 401: the engine does not accept the token; set engine_token to one that it does"


class StateStreams:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        trust: ssl.SSLContext,
        observer: Observer,
        bundles: Bundles,
        config: GatewayConfig,
    ) -> None:
        """`trust` verifies engines with `https` URLs."""
        self._session = session
        self._sockets = StateSockets()
        self._connector = StateConnector(config.connect_timeout_s, trust, self._sockets)
        self._observer = observer
        self._bundles = bundles
        self._config = config
        self._name = f"{socket.gethostname()}-{secrets.token_hex(8)}"
        named = {GATEWAY_HEADER.decode(): self._name, **protocol_headers()}
        self._drain_acknowledgements = DrainAcknowledgements(session, observer, config.handover_timeout_s, named)
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._asked: set[str] = set()
        """The endpoints whose stream has had a frame or has failed."""
        self._probed_ready: set[str] = set()
        self._hints: dict[str, asyncio.Event] = {}
        """An event for each endpoint, which is set to reconnect at once."""

    def sync(self) -> None:
        """Open and close streams so that there is one for each endpoint that the brain knows."""
        records = self._observer.registry.endpoints.values()
        wanted = {(record.endpoint.id, record.endpoint.control_url) for record in records}
        for gone in self._tasks.keys() - wanted:
            self._tasks.pop(gone).cancel()
        self._asked &= {endpoint_id for endpoint_id, _ in wanted}
        self._hint({record.endpoint.id for record in records if record.endpoint.probed_ready})
        for endpoint_id, control_url in wanted - self._tasks.keys():
            self._hints[endpoint_id] = asyncio.Event()
            self._observer.awaiting_first_report(endpoint_id)
            follower = self._follow(endpoint_id, control_url)
            self._tasks[endpoint_id, control_url] = asyncio.create_task(follower, name=f"state:{endpoint_id}")

    @property
    def settled(self) -> bool:
        """Whether each endpoint that the platform finds ready has sent a frame or has failed."""
        return self._probed_ready <= self._asked

    def _hint(self, probed_ready: set[str]) -> None:
        """Reconnect at once to endpoints that have become ready for the platform."""
        for endpoint_id in probed_ready - self._probed_ready:
            if endpoint_id in self._hints:
                self._hints[endpoint_id].set()
        self._probed_ready = probed_ready
        self._hints = {key[0]: self._hints[key[0]] for key in self._tasks}

    async def close(self) -> None:
        await self._drain_acknowledgements.close()
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sockets.close()

    async def _follow(self, endpoint_id: str, control_url: str) -> None:
        loop = asyncio.get_running_loop()
        pause_s, failing_since, is_logged = self._config.reconnect_base_s, loop.time(), False
        while True:
            progress = _Progress()
            try:
                await self._read(endpoint_id, control_url, progress)
                cause = "the stream ended"
            except STREAM_FAULTS as error:
                progress.refused = isinstance(error, CannotConnect) and error.refused
                progress.unusable = isinstance(error, BundleError)
                reason = error.__cause__ or error if isinstance(error, CannotConnect) else error
                cause = str(reason) if isinstance(reason, OUR_FAULTS) else f"{type(reason).__name__}: {reason}"
                if fault := tls_fault(reason):
                    cause, progress.unusable = fault, True
                    logger.warning("state stream of %s: %s", endpoint_id, fault)
            except Exception as error:
                # An unexpected error must not end this stream for good nor affect others.
                logger.exception("state stream of %s failed", endpoint_id)
                cause = f"{type(error).__name__}: {error}"
            if progress.num_frames:
                level = logging.INFO if self._observer.leaving(endpoint_id) else logging.WARNING
                logger.log(level, "state stream of %s lost: %s", endpoint_id, cause)
                pause_s, failing_since, is_logged = self._config.reconnect_base_s, loop.time(), False
            self._asked.add(endpoint_id)
            self._observer.stream_lost(endpoint_id)
            if progress.refused:
                self._observer.unreachable(endpoint_id)
            if progress.unusable:
                self._observer.note_phase(endpoint_id, "unusable", cause[:MAX_DETAIL_CHARS])
            elif progress.opened:
                self._observer.note_phase(endpoint_id, *await fetch_phase(self._session, control_url, cause))
            else:
                self._observer.note_phase(endpoint_id, "unreachable", cause)
                if not is_logged and loop.time() - failing_since >= SILENT_S:
                    logger.warning("waiting for engine %s at %s: %s", endpoint_id, control_url, cause)
                    is_logged = True
            await self._pause(endpoint_id, pause_s * random.uniform(0.5, 1.0))
            longest_s = max(self._config.reconnect_max_s, (loop.time() - failing_since) * LONG_FAILING_SHARE)
            pause_s = min(longest_s, LONGEST_PAUSE_S, pause_s * 2)

    async def _pause(self, endpoint_id: str, pause_s: float) -> None:
        hint = self._hints[endpoint_id]
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await hint.wait()
        hint.clear()

    async def _read(self, endpoint_id: str, control_url: str, progress: _Progress) -> None:
        """Read one connection to its end. Raises one of `STREAM_FAULTS` unless the engine ends the stream."""
        record = self._observer.registry.endpoints.get(endpoint_id)
        token = self._observer.registry.token_of(record) if record is not None else ""
        origin, head = self._head(control_url, token)
        apply = partial(self._apply, endpoint_id, progress)
        connection = await self._connector.connect(origin, lambda: StateConnection(apply))
        try:
            await self._begin(connection, head, progress)
            while frame := await connection.left_frame(self._config.state_idle_timeout_s):
                await self._ensure_bundle(frame, control_url, token)
                self._observe(endpoint_id, frame, progress)
                if frame.draining:
                    self._drain_acknowledgements.begin(endpoint_id, control_url, token)
                if not self._observer.ready(endpoint_id):
                    self._observer.note_phase(endpoint_id, *await fetch_phase(self._session, control_url, "starting"))
        finally:
            connection.abort()

    async def _begin(self, connection: StateConnection, head: bytes, progress: _Progress) -> None:
        async with asyncio.timeout(self._config.state_idle_timeout_s):
            await connection.ask(head)
        progress.opened = True
        if connection.status == HTTPStatus.UNAUTHORIZED:
            raise StreamRefused(WRONG_TOKEN)
        if connection.status != HTTPStatus.OK:
            raise StreamRefused(f"/internal/state answered {connection.status}")
        check_peer("The engine", {PROTOCOL_HEADER: connection.header(PROTOCOL_HEADER.lower().encode())})

    def _head(self, control_url: str, token: str) -> tuple[Origin, bytes]:
        try:
            origin = origin_of(control_url)
            gateway = f"{GATEWAY_HEADER.decode()}: {self._name}"
            return origin, request_head("GET /internal/state", origin, token, gateway)
        except ValueError as error:
            raise CannotConnect(refused=False) from error

    def _apply(self, endpoint_id: str, progress: _Progress, frame: StateFrame) -> bool:
        """Apply the frame, unless the task must handle it. Return whether it was applied. Raises `StateGap`."""
        if frame.draining or self._lacks_bundle(frame) or not self._observer.ready(endpoint_id):
            return False
        self._observe(endpoint_id, frame, progress)
        return True

    def _observe(self, endpoint_id: str, frame: StateFrame, progress: _Progress) -> None:
        self._observer.observe(endpoint_id, frame)
        progress.num_frames += 1
        self._asked.add(endpoint_id)

    def _lacks_bundle(self, frame: StateFrame) -> bool:
        digest = frame.digests.tokenizer_bundle
        return bool(digest) and digest not in self._bundles

    async def _ensure_bundle(self, frame: StateFrame, control_url: str, token: str) -> None:
        if self._lacks_bundle(frame):
            await self._bundles.fetch(frame.digests.tokenizer_bundle, control_url, token)


class _Progress:
    """The progress of one connection, which outlives the exception that ends it."""

    num_frames = 0
    opened = False
    refused = False
    """Whether no process listens on the port."""
    unusable = False
    """Whether this gateway cannot use the engine, because of its tokenizer or certificate, whatever it says itself."""


class _Readyz(msgspec.Struct):
    phase: str = ""
    detail: str = ""


async def fetch_phase(session: aiohttp.ClientSession, control_url: str, otherwise: str) -> tuple[str, str]:
    """Return phase and detail from `/readyz`, such as `("loading", "weights 40 %")`.

    Without an answer, return `("unreachable", otherwise)`.
    """
    timeout = aiohttp.ClientTimeout(total=READYZ_TIMEOUT_S)
    try:
        async with session.get(f"{control_url}/readyz", timeout=timeout, allow_redirects=False) as response:
            answer = msgspec.json.decode(await read_bounded(response, READYZ_MAX_BYTES), type=_Readyz)
    except (aiohttp.ClientError, TimeoutError, OSError, TooLarge, msgspec.DecodeError, UnicodeDecodeError):
        return "unreachable", otherwise
    return answer.phase[:100] or "not ready", answer.detail[:MAX_DETAIL_CHARS] or otherwise


def tls_fault(error: BaseException) -> str:
    """Return the message for a TLS error, with the remedy; empty for other errors."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{error.verify_message}: the engine's certificate is not accepted; set engine_tls.ca_file to its "
            "authority, and engine_tls.server_name to a name in it"
        )
    if isinstance(error, ssl.SSLError):
        return "the engine has no TLS: its URL begins with https, so set tls of the engine"
    return ""
