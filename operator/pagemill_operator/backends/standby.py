"""Standby replicas: decides which to wake and which to put to sleep, and makes the two calls.

The decision is a pure function of the number of replicas that serve and the phases of all. A sleeping replica is woken
before anything else could become ready. Only ready replicas beyond the wanted number are put to sleep, so with an
unchanged number nothing changes, and a starting replica is left alone. `rollout` or Kubernetes decides how many
replicas exist. Without autoscaling nothing is woken: a user put the replica to sleep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import aiohttp

from pagemill_operator.autoscaler.signals import weight
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.observation import Phase, ReplicaObservation
from pagemill_protocol.report.load import EngineReport

Call = Literal["sleep", "wake_up"]
"""Both calls may be repeated."""
CALL_WAIT_S = {"sleep": 5.0, "wake_up": 30.0}
"""Seconds to wait for each call. An engine with running requests sleeps later; that is not awaited."""
CALL_MARGIN_S = 5.0
MAX_ANSWER_BYTES = 1000


class StandbyActions(NamedTuple):
    """Names of the replicas to wake and to put to sleep."""

    wake: list[str]
    sleep: list[str]


NONE = StandbyActions([], [])
NO_REPORTS: Mapping[str, EngineReport] = {}


def next_standby_actions(
    plan: Plan, replicas: Sequence[ReplicaObservation], held: Mapping[str, EngineReport] = NO_REPORTS
) -> StandbyActions:
    """Return the calls to make. `replicas` come oldest first; `held` is each replica's known load by name."""
    if plan.autoscaling is None or plan.autoscaling.mode != "Active":
        return NONE
    live = [replica for replica in replicas if replica.live]
    ready, waking, asleep = (_in_phase(phase, live) for phase in ("ready", "waking", "asleep"))
    missing = plan.replicas - len(ready) - len(waking)
    if missing > 0:
        return StandbyActions([replica.name for replica in asleep[:missing]], [])
    if any(replica.digest != plan.groups[0].digest for replica in live):
        # A rollout counts ready replicas: a sleeping one would look like one that never becomes ready.
        return NONE
    num_surplus = min(len(ready) - plan.replicas, plan.standby - len(asleep))
    youngest_first = ready[::-1]
    least_missed = sorted(youngest_first, key=lambda replica: _loss(replica, held))
    return StandbyActions([], [replica.name for replica in least_missed[: max(0, num_surplus)]])


def _loss(replica: ReplicaObservation, held: Mapping[str, EngineReport]) -> tuple[bool, tuple[int, int], float]:
    """Return the sort key of what putting a replica to sleep costs.

    A replica to which no gateway sends requests sleeps first, as it has just started; then the emptiest; among equals
    the one that became ready last. A replica finishes its requests before it sleeps, so requests that gateways do not
    see are not lost.
    """
    engine = held.get(replica.name)
    return engine is not None, weight(engine) if engine is not None else (0, 0), -replica.ready_at


def _in_phase(phase: Phase, replicas: list[ReplicaObservation]) -> list[ReplicaObservation]:
    return [replica for replica in replicas if replica.phase == phase]


async def call_engine(session: aiohttp.ClientSession, control_url: str, token: str, call: Call) -> str:
    """Call the engine; return why it refused or did not answer, or "" if it follows the call, at once or later."""
    wait_s = CALL_WAIT_S[call]
    timeout = aiohttp.ClientTimeout(total=wait_s + CALL_MARGIN_S)
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{control_url}/{call}?wait_s={wait_s:g}"
    try:
        async with session.post(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            answer = await response.content.read(MAX_ANSWER_BYTES)
            return "" if response.status < 300 else f"{response.status} {answer.decode(errors='replace')}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}"
