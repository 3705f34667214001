"""The client of engines: sends one attempt over the engine's link. It neither retries nor chooses engines."""

from __future__ import annotations

from collections.abc import Callable

from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.engine_http.connecting import CannotConnect, origin_of
from pagemill_gateway.relay.answer_stream import AnswerStream, AskLiveness
from pagemill_gateway.relay.engine_link import LinkTimeouts
from pagemill_gateway.relay.links import Links
from pagemill_routing.attempts.attempt_failures import BROKE, SILENT, UpstreamFailure
from pagemill_routing.brain.interface import Assignment
from pagemill_servers.tls.certificates import EngineTrust


class Upstream:
    """The client of all engines. Create it inside a running event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        trust = EngineTrust(config.engine_tls.ca_file, config.engine_tls.server_name)
        timeouts = LinkTimeouts(config.accept_timeout_s, config.silence_timeout_s)
        self._links = Links(config.connect_timeout_s, trust, timeouts)

    async def close(self) -> None:
        await self._links.close()

    async def open(
        self,
        assignment: Assignment,
        body: bytes,
        request_id: str,
        liveness: AskLiveness,
        on_accepted: Callable[[], None],
        on_freed: Callable[[], None],
    ) -> AnswerStream:
        """Send an encoded `GenerateRequest`, and return the stream of its answer, which the caller must close.

        `on_accepted` is called before the first frame can be read, and `on_freed` when the engine has computed the
        request and the client has not read its answer. This and the first read raise `UpstreamFailure`; the
        first read raises `PagemillError` for a request that no engine would accept.
        """
        try:
            origin, token = origin_of(assignment.data_url), assignment.token
            link = self._links.ready(origin, token) or await self._links.open(origin, token)
        except (CannotConnect, OSError, ValueError) as error:
            raise _failure_of(error) from error
        return await link.send(body, request_id, liveness, on_accepted, on_freed)


def _failure_of(error: CannotConnect | OSError | ValueError) -> UpstreamFailure:
    """Return the failure for an engine that was not reached, or that has not begun to respond."""
    if isinstance(error, CannotConnect):
        return UpstreamFailure("unreachable" if error.refused else "stalled", str(error))
    if isinstance(error, TimeoutError):
        return UpstreamFailure("stalled", SILENT)
    return UpstreamFailure("lost", BROKE)
