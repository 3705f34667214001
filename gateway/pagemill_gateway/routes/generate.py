"""The generating routes of all dialects, such as `POST /v1/chat/completions`, in plain ASGI.

A request passes authentication, the gate, its preparation (`relay.preparation`), the caller's limits
(`limits.limiter`), and its answer (`relay.answers`). After the first byte of a stream, a failure is sent as an error
event.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial

from starlette.types import Receive, Scope, Send

from pagemill_api.dialects.base import Dialect
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai.unread_fields import unread_headers
from pagemill_gateway.limits.limiter import Reservation
from pagemill_gateway.relay import answers
from pagemill_gateway.relay.delivery import AnswerBroken
from pagemill_gateway.relay.preparation import PreparedRequest
from pagemill_gateway.request_record import RequestRecord
from pagemill_gateway.routes.access import record_of
from pagemill_gateway.routes.body import prepared_bytes, read_counted
from pagemill_gateway.routes.client import ClientResponse, ClientTooSlow
from pagemill_gateway.routes.connection import run_while_connected
from pagemill_gateway.routes.entry import EnteredRequest, entered
from pagemill_gateway.worker import Worker
from pagemill_protocol.errors import PagemillError, bad_upstream, internal_error, invalid_field, show
from pagemill_routing.brain.interface import QueueTicket
from pagemill_servers.direct import direct_response
from pagemill_servers.keys.caller import Caller
from pagemill_servers.request_middleware import TIMEOUT_HEADER, check_json_content_type, header

logger = logging.getLogger("pagemill.gateway")

MAX_TIMEOUT_S = 24 * 3600.0


class GenerateRoute:
    def __init__(self, worker: Worker, dialect: Dialect) -> None:
        self._worker = worker
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        worker = self._worker
        record = record_of(scope)
        direct = direct_response(scope)
        client = ClientResponse(send, worker.config.slow_client_timeout_s, self._dialect, direct)
        try:
            caller = scope["state"].get("caller") or worker.keys.authenticate(scope)
            record.called_by(caller)
            timeout_s = _timeout_s(scope, worker.config.request_timeout_s)
            check_json_content_type(scope, self._dialect.transport.media_types)
            with entered(worker, caller) as entry:
                client.slot = entry.slot
                raw = await read_counted(scope, receive, entry.slot, worker.config.max_body_bytes)
                info = await self._request_info(scope, raw, caller)
                work = self._serve(raw, entry, info, timeout_s, client, record)
                stayed = await run_while_connected(work, receive, direct)
        except PagemillError as error:
            record.failed(error)
            await client.fail(error, record.num_events)
            return
        finally:
            client.close()
        if not stayed:
            record.client_left()
        elif client.is_aborted and direct is None:
            # Only a connection can be closed within an answer; a line of a batch must not take it for complete.
            raise bad_upstream("The answer broke off.")

    async def _request_info(self, scope: Scope, raw: bytes, caller: Caller) -> RequestInfo:
        info = RequestInfo(scope["path"], scope.get("path_params", {}), partial(_header, scope))
        if not self._dialect.transport.may_omit_model or b'"model"' in raw:
            return info
        names = [each for each in await self._worker.brain.names() if caller.may_use(each.name) and not each.pools]
        return info._replace(only_model=names[0].model if len({each.model for each in names}) == 1 else "")

    async def _serve(
        self,
        raw: bytes,
        entry: EnteredRequest,
        info: RequestInfo,
        timeout_s: float | None,
        client: ClientResponse,
        record: RequestRecord,
    ) -> None:
        """Send the answer or the error. All errors are handled."""
        try:
            try:
                record.ticket = _ticket(raw, entry.caller, timeout_s, record)
                async with self._worker.running.limited(timeout_s):
                    dialect = await self._dialect_for(raw, entry, client)
                    await self._answer(raw, dialect, entry, info, client, record)
            except AnswerBroken as broken:
                record.failed(broken.error)
                record.has_broken_off = True
                await (client.end() if broken.reported else client.fail(broken.error, record.num_events))
            except PagemillError as error:
                record.failed(error)
                await client.fail(error, record.num_events)
        except ClientTooSlow:
            logger.info("request %s: the client stopped reading", record.request_id)
            record.client_left()
            client.abort()
        except Exception:
            logger.exception("request %s failed", record.request_id)
            record.failed(internal_error())
            await client.fail(internal_error(), record.num_events)

    async def _dialect_for(self, raw: bytes, entry: EnteredRequest, client: ClientResponse) -> Dialect:
        """Return the dialect of this request. Raises `PagemillError`."""
        return self._dialect

    async def _answer(
        self,
        raw: bytes,
        dialect: Dialect,
        entry: EnteredRequest,
        info: RequestInfo,
        client: ClientResponse,
        record: RequestRecord,
    ) -> None:
        worker, caller = self._worker, entry.caller
        prepared = await worker.preparation.prepare(raw, dialect, caller, info, record, client.write)
        record.served_by(prepared.target, prepared.requests)
        worker.metrics.prepared(record)
        entry.slot.resize(len(raw) + prepared_bytes(prepared.requests))
        client.request = prepared.requests[0]
        client.add_headers(unread_headers(prepared.unread_fields))
        reservation = await worker.limiter.reserve(caller, prepared.target, prepared.requests)
        entry.arrival.over()
        was_cut_short = False
        try:
            client.add_headers(reservation.headers)
            await self._relay(prepared, client, record, reservation)
        except (asyncio.CancelledError, ClientTooSlow):
            was_cut_short = True
            raise
        finally:
            reservation.settle(record, was_cut_short=was_cut_short)

    async def _relay(
        self, prepared: PreparedRequest, client: ClientResponse, record: RequestRecord, reservation: Reservation
    ) -> None:
        """Send the answer. The reservation ends before it, so that a client's next request finds its place free."""
        worker, allowances = self._worker, reservation.allowances

        ended = partial(reservation.end, record)
        if prepared.stream:
            direct = client.direct
            await answers.stream(worker.relay, prepared, client.write, record, allowances, ended, direct, client)
            await client.end()
            return
        client.is_body = True
        body = await answers.collect(worker.relay, prepared, record, allowances, ended, client)
        await (client.end() if body is None else client.send_body(body))


def _header(scope: Scope, name: str) -> str | None:
    return header(scope, name.encode())


def _ticket(raw: bytes, caller: Caller, timeout_s: float | None, record: RequestRecord) -> QueueTicket:
    deadline_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
    return QueueTicket(key=caller.account, num_bytes=len(raw), arrived_at=record.started_at, deadline_at=deadline_at)


def _timeout_s(scope: Scope, default: float | None) -> float | None:
    value = header(scope, TIMEOUT_HEADER)
    if value is None:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid_field(
            TIMEOUT_HEADER.decode(),
            f"The header x-request-timeout-s must be a number of seconds above 0, got {show(value)}.",
        )
    return seconds
