"""Reports scaling decisions to gateways, which show them on their page `/ui`.

A gateway receives them while its load stream is read (`stream`): first all that are kept, then each new one. It
ignores those that it knows, so nothing is lost when a gateway, or the operator, is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
import msgspec

from pagemill_operator.autoscaler.decision import Goal
from pagemill_operator.autoscaler.records import Record
from pagemill_protocol.report.scaling import KEPT_DECISIONS, ScalingDecision, ScalingGoal, ScalingReport
from pagemill_protocol.versions import protocol_headers

logger = logging.getLogger("pagemill.operator.load")

RETRY_S = 2.0
TIMEOUT = aiohttp.ClientTimeout(total=5.0)
COALESCED_S = 0.5
"""Decisions of this time are sent together."""
PERMANENT_STATUSES = frozenset(range(400, 500)) - {401, 408, 429}
"""HTTP statuses that do not change if the same is sent again; a gateway of an earlier version answers 404."""


class _Numbered(NamedTuple):
    number: int
    decision: ScalingDecision


class DecisionHistory:
    """The latest decisions on all deployments."""

    def __init__(self) -> None:
        self._kept: deque[_Numbered] = deque(maxlen=KEPT_DECISIONS)
        self._num_noted = 0
        self._changed = asyncio.Event()
        """Replaced by a new one after each decision."""

    def note(self, record: Record) -> None:
        self._num_noted += 1
        self._kept.append(_Numbered(self._num_noted, described(record)))
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, number: int) -> tuple[int, list[ScalingDecision]]:
        """Wait until there are decisions after the first `number`; return their number in all, and those kept."""
        while self._num_noted <= number:
            await self._changed.wait()
        return self._num_noted, [each.decision for each in self._kept if each.number > number]


def described(record: Record) -> ScalingDecision:
    """Return the decision as people read it."""
    decision, settings = record.decision, record.settings
    return ScalingDecision(
        key=record.key,
        time=record.time,
        mode=settings.mode,
        policy=settings.policy,
        replicas_before=decision.replicas_before,
        replicas=decision.replicas,
        reason=decision.reason,
        message=decision.message,
        goals=[ScalingGoal(name=each.name, needed=each.needed, reason=_why(each)) for each in decision.goals],
    )


def _why(goal: Goal) -> str:
    missing = f"not known: {goal.missing}" if goal.missing else ""
    return "; ".join(filter(None, [goal.reason, missing, goal.unreachable]))


@asynccontextmanager
async def publishing(
    session: aiohttp.ClientSession, control_url: str, token: str, history: DecisionHistory
) -> AsyncIterator[None]:
    """Report decisions to the gateway while the block runs; faults are retried and never end it."""
    task = asyncio.create_task(_keep_publishing(session, control_url, token, history), name="scaling decisions")
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended, Exception):
            logger.error("scaling decisions could not be reported to gateway %s", control_url, exc_info=ended)


async def _keep_publishing(
    session: aiohttp.ClientSession, control_url: str, token: str, history: DecisionHistory
) -> None:
    num_published = 0
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **protocol_headers()}
    url = f"{control_url}/internal/scaling"
    while True:
        number, decisions = await history.after(num_published)
        body = msgspec.json.encode(ScalingReport(decisions=decisions))
        try:
            async with session.post(
                url, data=body, headers=headers, timeout=TIMEOUT, allow_redirects=False
            ) as response:
                fault = "" if response.status < 300 else f"the answer is {response.status}"
                if response.status in PERMANENT_STATUSES:
                    logger.info("gateway %s does not take scaling decisions for its page: %s", control_url, fault)
                    return
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            fault = str(error) or type(error).__name__
        if fault:
            logger.debug("gateway %s did not take scaling decisions, trying again: %s", control_url, fault)
            await asyncio.sleep(RETRY_S)
            continue
        num_published = number
        await asyncio.sleep(COALESCED_S)
