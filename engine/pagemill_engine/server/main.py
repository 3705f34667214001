"""Runs one server from start to end: binds ports, loads the model, serves requests, drains.

Both ports are bound before anything slow happens: a port in use is known at once, and while the model loads the control
port already says why it is not ready. The engine runs in a process of its own (`ipc.channels`); this process never
imports torch. `__main__` and `pagemill serve` call `run_server`; routes are in `apps`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from starlette.types import ASGIApp

from pagemill_api.answers.registry import check_parsers
from pagemill_api.grammars.check import CHECKS
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_api.text.turn_end import warn_of_turn_end
from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_engine.failure import StartupError
from pagemill_engine.ipc.channels import EngineChannel, EngineDied
from pagemill_engine.ipc.messages import Ready
from pagemill_engine.ipc.process import EngineProcess
from pagemill_engine.server.adapters import ServedAdapters
from pagemill_engine.server.context import ServerContext
from pagemill_engine.server.engine_client import EngineClient
from pagemill_engine.server.fit import check_fits
from pagemill_engine.server.followed_file import FollowedFile
from pagemill_engine.server.metrics import ServerMetrics
from pagemill_engine.server.phases.draining import ACKNOWLEDGE_TIMEOUT_S, Draining
from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.sleeping import Sleeping
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_engine.server.request_memory import RequestMemory
from pagemill_engine.server.routes.apps import control_app, data_app
from pagemill_engine.server.routes.keys import internal_tokens, open_keys, with_token
from pagemill_engine.server.settings import Settings
from pagemill_execution.sizing.unused_settings import UnusedSetting, unused_settings, without
from pagemill_execution.starting.opened_model import open_model
from pagemill_models.sources import Opened, SourceError, default_name
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_models.tokenizer_files.resolved_defaults import with_defaults
from pagemill_protocol.errors import ENGINE_CRASHED, ENGINE_FAILED, PagemillError, unavailable
from pagemill_protocol.link import LINK_PROTOCOL
from pagemill_protocol.report.adapters import NAMES_FILE, ModelNames
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.tokenizer_bundle import TokenizerBundle
from pagemill_servers.connection import bounded_protocol
from pagemill_servers.connection_limits import (
    DEFAULT_MAX_CONNECTIONS,
    MAX_CONTROL_CONNECTIONS,
    ConnectionLimits,
    within_open_files,
)
from pagemill_servers.process.http_server import HttpServer
from pagemill_servers.process.listening import ListenError, bind_both, bound_address
from pagemill_servers.process.malloc import return_freed_memory, trim_heap
from pagemill_servers.process.settings import SettingsError
from pagemill_servers.process.stop_signals import Stop
from pagemill_servers.tls.certificates import ServerTLS, TLSError
from pagemill_servers.tracing.tracing import Tracing, open_tracing

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5
"""Time that connections get at the end to read their last bytes."""
SECOND_SIGNAL_FLUSH_S = 0.3
"""The same time after a second signal."""


@dataclass(slots=True)
class ServerEvents:
    """Callbacks for the caller. All are called on the event loop and must return at once."""

    on_listening: Callable[[int, int], None] = lambda port, control_port: None
    """Called with the bound data port and control port."""
    on_token: Callable[[str], None] = lambda path: None
    """Called with the path of the token file that was created because no token was configured."""
    on_phase: Callable[[str, str], None] = lambda phase, detail: None
    """Called with the phase and the reason for the wait."""
    on_ready: Callable[[Ready], None] = lambda ready: None
    on_drain: Callable[[int], None] = lambda num_requests: None
    """Called at a signal with the number of running requests."""


def run_server(settings: Settings, process: EngineProcess, events: ServerEvents | None = None) -> None:
    """Serve until a signal arrives. Raises `StartupError` if the server could not start or had to end.

    `process`: already launched, so that its imports and the caller's import of this module run at the same time.
    """
    return_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Server(settings, process, events or ServerEvents()).run())


class Server:
    def __init__(self, settings: Settings, process: EngineProcess, events: ServerEvents) -> None:
        self._settings = settings
        self._process = process
        self._events = events
        self._tls = _open_tls(settings.server)
        names = settings.engine.served_names or [default_name(settings.engine.model)]
        lifecycle = Lifecycle(self._on_phase)
        publisher = StatePublisher(names)
        metrics = ServerMetrics(names[0], settings.engine)
        CHECKS.max_form_chars = settings.engine.max_form_chars
        self._context = ServerContext(
            settings=settings,
            names=names,
            created_unix_s=int(time.time()),
            lifecycle=lifecycle,
            publisher=publisher,
            metrics=metrics,
            tokens=internal_tokens(settings.server),
            keys=open_keys(settings.server),
            draining=Draining(lifecycle, publisher),
            sleeping=Sleeping(lifecycle, publisher, metrics),
            tracing=_open_tracing(settings.server),
            memory=RequestMemory(settings.server.max_in_flight_body_bytes),
        )
        if settings.engine.enable_lora:
            self._context.adapters = ServedAdapters(settings.engine, names, publisher, metrics)
        self._names_file = _names_file(settings.server, self._context)
        self._was_ready = False
        self._warming_up: asyncio.Task[None] | None = None
        self._opened: Opened | None = None
        self._stop = Stop()
        """The second signal ends the server without waiting."""

    async def run(self) -> None:
        context, server = self._context, self._settings.server
        data_socket, control_socket = _open_ports(server)
        with data_socket, control_socket, with_token(server, *bound_address(control_socket)) as guarded:
            if guarded is not server:
                context.tokens = internal_tokens(guarded)
                self._events.on_token(str(guarded.internal_tokens_file))
            self._events.on_listening(bound_address(data_socket)[1], bound_address(control_socket)[1])
            await self._serve(data_socket, control_socket)

    async def _serve(self, data_socket: socket.socket, control_socket: socket.socket) -> None:
        """Serve on bound sockets until the end."""
        context, server = self._context, self._settings.server
        data_limits = ConnectionLimits(within_open_files(DEFAULT_MAX_CONNECTIONS))
        async with contextlib.AsyncExitStack() as stack:
            certificate = await stack.enter_async_context(self._tls.followed()) if self._tls is not None else None
            control_limits = ConnectionLimits(MAX_CONTROL_CONNECTIONS)
            data = _http_server(data_app(context), server, data_limits, certificate)
            control = _http_server(control_app(context), server, control_limits, certificate)
            stack.enter_context(self._stop.on_signals())
            http = [
                asyncio.create_task(data.serve(sockets=[data_socket])),
                asyncio.create_task(control.serve(sockets=[control_socket])),
            ]
            publisher = asyncio.create_task(context.publisher.run())
            if self._names_file is not None:
                stack.callback(asyncio.create_task(self._names_file.follow()).cancel)
            engine = asyncio.create_task(self._run_engine())
            try:
                await self._until_end(engine, publisher)
            finally:
                await self._close(engine, publisher, [data, control], http)

    async def _run_engine(self) -> None:
        """Load the parts of the model that this process needs, then read the engine process's messages until it
        ends."""
        context, config = self._context, self._settings.engine
        context.lifecycle.enter("loading", f"opening {config.model}")
        opened, bundle, unused = await context.off_loop(lambda: _open_model(self._settings))
        if unused:
            self._report_unused(unused)
        config = msgspec.structs.replace(
            without(config, unused),
            model_folder=opened.folder,
            eos_token_ids=config.eos_token_ids or list(bundle.eos_token_ids),
            vocab_size=config.vocab_size or bundle.vocab_size or None,
        )
        channel = EngineChannel(config, self._process)
        context.client = EngineClient(
            channel,
            context.lifecycle,
            context.publisher,
            context.metrics,
            context.sleeping,
            context.settings.server.max_unread_bytes,
            context.memory,
        )
        if context.adapters is not None:
            context.client.on_ready = partial(self._load_adapters, context.adapters, context.client)
            context.client.on_adapters = context.adapters.used
        context.lifecycle.enter("loading", "importing the engine's libraries")
        await context.client.start()
        context.tokenizer = await context.off_loop(lambda: _make_tokenizer(config, bundle))
        context.publisher.announce_bundle(bundle.digest)
        self._warming_up = asyncio.create_task(context.off_loop(partial(_warm_up, context.tokenizer)))
        if opened.fetched is None:
            await context.client.run()
        else:
            self._opened = opened
            await self._run_while_fetching(context.client, asyncio.wrap_future(opened.fetched))

    async def _load_adapters(self, adapters: ServedAdapters, client: EngineClient) -> None:
        """Wait for the adapters without which the server is not ready. Raises `StartupError`."""

        def on_wait(names: str) -> None:
            self._context.lifecycle.enter("loading", f"adapters {names}")

        try:
            await adapters.start(client.adapters, on_wait)
        except PagemillError as error:
            raise StartupError("AdapterRefused", f"`lora_modules`: {error.message}", "lora_modules") from error

    def _report_unused(self, unused: list[UnusedSetting]) -> None:
        for each in unused:
            logger.warning("%s The engine runs without it.", each.message)
        self._context.publisher.announce_unused([each.name for each in unused])

    async def _run_while_fetching(self, client: EngineClient, fetched: asyncio.Future[Path]) -> None:
        """Run the engine client while the model's files are being fetched.

        Raises `StartupError` if the fetch fails: its fault is known before the engine process misses a file.
        """
        engine = asyncio.create_task(client.run())
        try:
            await asyncio.wait((engine, fetched), return_when=asyncio.FIRST_COMPLETED)
            if fetched.done():
                with _source_faults(self._settings.engine):
                    fetched.result()
            await engine
        finally:
            engine.cancel()
            self._forget_links()

    def _forget_links(self) -> None:
        if self._opened is not None:
            self._opened.forget_links()
            self._opened = None

    async def _until_end(self, *needed: asyncio.Task[None]) -> None:
        """Wait for a signal and its drain. Raises `StartupError` if a needed task ended by itself."""
        signalled = asyncio.create_task(self._stop.wait(1))
        try:
            await asyncio.wait([*needed, signalled], return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in needed):
                await self._drain(needed)
        finally:
            signalled.cancel()
        for task in needed:
            if task.done():
                self._report_failure(task)

    async def _drain(self, needed: Sequence[asyncio.Task[None]]) -> None:
        """Become unready, let running requests finish, then end the remaining ones with an error."""
        context = self._context
        context.drain()
        if context.client is None:
            return
        self._events.on_drain(context.client.num_requests)
        served = asyncio.create_task(self._finish(context.client))
        second_signal = asyncio.create_task(self._stop.wait(2))
        try:
            await asyncio.wait([served, second_signal, *needed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            served.cancel()
            second_signal.cancel()
        context.lifecycle.refuse_requests()
        context.client.fail_all(_shutting_down())

    async def _finish(self, client: EngineClient) -> None:
        """Wait until no gateway sends requests and none runs, at most `drain_timeout_s`."""
        timeout_s = self._settings.server.drain_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._context.draining.settle(min(ACKNOWLEDGE_TIMEOUT_S, timeout_s))
                await client.wait_idle()

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        error = task.exception()
        assert error is not None, "engine client and publisher only return by raising, until they are closed"
        self._context.lifecycle.enter("failed", str(error))
        if self._context.client is not None:
            # The text of an unexpected error is for the log.
            why = f": {error}" if isinstance(error, StartupError) else ". Send the request again."
            self._context.client.fail_all(unavailable(f"This server failed{why}", 1, code=_failure_code(error)))
        if isinstance(error, StartupError):
            raise error
        logger.error("the server ends because of an internal error", exc_info=error)
        raise StartupError("ServerFailed", f"{type(error).__name__}: {error}") from error

    async def _close(
        self,
        engine: asyncio.Task[None],
        publisher: asyncio.Task[None],
        servers: list[HttpServer],
        http: list[asyncio.Task[None]],
    ) -> None:
        """End streams, flush connections and end the engine process, all at the same time."""
        context = self._context
        engine.cancel()
        await context.sleeping.close()
        if context.adapters is not None:
            context.adapters.close()
        context.publisher.close()
        for server in servers:
            server.end()
        closing: list[asyncio.Future[object]] = [asyncio.ensure_future(task) for task in (*http, publisher)]
        if context.client is not None:
            closing.append(asyncio.ensure_future(context.client.close()))
        ending_at_once = asyncio.create_task(self._end_at_second_signal(servers))
        await asyncio.gather(engine, *closing, return_exceptions=True)
        traces = asyncio.create_task(context.tracing.close())
        await asyncio.wait([traces, ending_at_once], return_when=asyncio.FIRST_COMPLETED)
        for task in (traces, ending_at_once):
            task.cancel()
        context.lifecycle.enter("stopped")
        context.close()

    async def _end_at_second_signal(self, servers: list[HttpServer]) -> None:
        """At a second signal, stop waiting for the engine process's step and for clients that do not read."""
        await self._stop.wait(2)
        if self._context.client is not None:
            self._context.client.kill()
        await asyncio.sleep(SECOND_SIGNAL_FLUSH_S)
        for server in servers:
            server.cut_connections()

    def _on_phase(self, phase: str, detail: str) -> None:
        self._context.metrics.phase(phase)
        self._events.on_phase(phase, detail)
        client = self._context.client
        if phase == "ready" and not self._was_ready and client is not None and client.ready_info is not None:
            # A wake-up enters `ready` again but must not be reported again.
            self._was_ready = True
            self._forget_links()
            self._events.on_ready(client.ready_info)


def _open_ports(server: ServerConfig) -> tuple[socket.socket, socket.socket]:
    try:
        return bind_both(server.host, server.port, server.control_host, server.control_port)
    except ListenError as error:
        raise StartupError(error.reason, str(error), error.field) from error


def _names_file(server: ServerConfig, context: ServerContext) -> FollowedFile[ModelNames] | None:
    """Return the file of the model's names, which has been read once; None if there is none."""
    if server.names_file is not None:
        path = Path(server.names_file)
    elif server.internal_tokens_file is not None:
        path = Path(server.internal_tokens_file).with_name(NAMES_FILE)
    else:
        return None
    file = FollowedFile(path, ModelNames, lambda found: context.rename(found.names or context.names))
    file.read()
    return file


def _http_server(
    app: ASGIApp, server: ServerConfig, limits: ConnectionLimits, certificate: ssl.SSLContext | None
) -> HttpServer:
    protocol = bounded_protocol(server.max_header_bytes, upgrades=(LINK_PROTOCOL,), limits=limits)
    idle_s = server.idle_connection_timeout_s
    return HttpServer(app, protocol, limits, certificate, keep_alive_s=idle_s, flush_timeout_s=FLUSH_TIMEOUT_S)


def _open_tls(server: ServerConfig) -> ServerTLS | None:
    try:
        return None if server.tls is None else ServerTLS(server.tls)
    except TLSError as error:
        raise StartupError("SettingsInvalid", str(error), "tls") from error


def _open_model(settings: Settings) -> tuple[Opened, TokenizerBundle, list[UnusedSetting]]:
    """Open the model and check everything that the engine process depends on. Weights may still be being fetched.

    Also return the settings without effect that a stored object may have; other engines refuse them later.
    """
    config = settings.engine
    with _source_faults(config):
        opened = open_model(config)
        path = opened.path
        spec = None if config.null_runner else load_model_spec(path)
        if spec is not None:
            check_fits(config, spec, path)
        bundle = with_defaults(load_bundle(path), config.generation_config, config.generation_defaults)
        bundle = _with_chats(bundle, config)
        check_parsers(ParserSettings(config.tool_call_parser, config.reasoning_parser))
        if spec is None:
            return opened, bundle, []
        unused = unused_settings(config, spec) if settings.server.only_gateways else []
        return opened, msgspec.structs.replace(bundle, pooling=spec.pooling, has_states=spec.has_states), unused


def _with_chats(bundle: TokenizerBundle, config: EngineConfig) -> TokenizerBundle:
    """Return the bundle with the settings for chats, so that gateways render and parse as this engine does."""
    bundle = msgspec.structs.replace(
        bundle, tool_call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
    )
    if config.chat_template is None:
        return bundle
    return msgspec.structs.replace(bundle, chat_template=config.chat_template, tool_chat_template=None)


def _make_tokenizer(config: EngineConfig, bundle: TokenizerBundle) -> Tokenizer:
    with _source_faults(config):
        tokenizer = Tokenizer(bundle, chat_template=config.chat_template)
        tokenizer.check_limits()
    if tokenizer.limited_because:
        logger.warning("the model's tokenizer runs in a limited process: %s", tokenizer.limited_because)
    return tokenizer


def _warm_up(tokenizer: Tokenizer) -> None:
    """Prepare and check the chat template, and release the memory that reading the vocabulary took."""
    tokenizer.warm_up()
    warn_of_turn_end(tokenizer)
    trim_heap()


@contextlib.contextmanager
def _source_faults(config: EngineConfig) -> Iterator[None]:
    """Turn the faults of a model's files into `StartupError`s."""
    try:
        yield
    except SourceError as error:
        # `SourceError` names the resource's field, not the engine's setting.
        raise StartupError(error.reason, f"`model`: {error.message}", "model") from error
    except PagemillError as error:
        raise StartupError("ModelUnreadable", f"`model` {config.model!r}: {error.message}", "model") from error


def _open_tracing(server: ServerConfig) -> Tracing:
    try:
        return open_tracing(server.tracing)
    except SettingsError as error:
        raise StartupError("SettingsInvalid", str(error), "tracing") from error


def _failure_code(error: BaseException) -> str:
    """Return the error code that says whether the engine crashed by itself.

    A kill from outside says nothing about the requests.
    """
    by_itself = isinstance(error, StartupError) and not (
        isinstance(error.__cause__, EngineDied) and error.__cause__.was_killed
    )
    return ENGINE_CRASHED if by_itself else ENGINE_FAILED


def _shutting_down() -> PagemillError:
    return unavailable("This server is shutting down. Send the request again.", retry_after_s=1, code="draining")
