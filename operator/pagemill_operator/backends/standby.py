"""Replicas that stand by: which to wake and which to put to sleep, and the two calls that do it.

What to do is a pure function of how many replicas shall serve and what all of them do. One that sleeps is woken before
anything else could be ready. Put to sleep is only what is ready beyond the wanted number, so with an unchanged number
nothing changes, and nothing that starts is touched. How many replicas there are is decided by `rollout`, or by
Kubernetes. Without autoscaling nothing is woken either: a replica that sleeps was put to sleep by a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import aiohttp

from pagemill_operator.autoscaler.signals import weight
from pagemill_operator.plan.types import Plan
from pagemill_operator.status.observation import Phase, ReplicaObservation
from pagemill_protocol.load import EngineHeld

Call = Literal["sleep", "wake_up"]
"""Both may be repeated."""
CALL_WAIT_S = {"sleep": 5.0, "wake_up": 30.0}
"""An engine whose requests still run sleeps when they are done: that is not waited for."""
CALL_MARGIN_S = 5.0
MAX_ANSWER_BYTES = 1000


class Orders(NamedTuple):
    """Names of replicas."""

    wake: list[str]
    sleep: list[str]


NONE = Orders([], [])
NOTHING_KNOWN: Mapping[str, EngineHeld] = {}


def next_orders(
    plan: Plan, replicas: Sequence[ReplicaObservation], held: Mapping[str, EngineHeld] = NOTHING_KNOWN
) -> Orders:
    """`replicas` come oldest first. `held`: what is known of them, by name."""
    if plan.autoscaling is None or plan.autoscaling.mode != "Active":
        return NONE
    live = [replica for replica in replicas if replica.live]
    ready, waking, asleep = (_in_phase(phase, live) for phase in ("ready", "waking", "asleep"))
    missing = plan.replicas - len(ready) - len(waking)
    if missing > 0:
        return Orders([replica.name for replica in asleep[:missing]], [])
    if any(replica.digest != plan.groups[0].digest for replica in live):
        # Replacing counts those that are ready: one that slept would look like one that never comes.
        return NONE
    num_surplus = min(len(ready) - plan.replicas, plan.standby - len(asleep))
    youngest_first = ready[::-1]
    least_missed = sorted(youngest_first, key=lambda replica: _loss(replica, held))
    return Orders([], [replica.name for replica in least_missed[: max(0, num_surplus)]])


def _loss(replica: ReplicaObservation, held: Mapping[str, EngineHeld]) -> tuple[bool, tuple[int, int], float]:
    """What order replicas sleep in: first one that no gateway sends anything to, as it has just started; then the
    emptiest; of equals the one that became ready last, so that what serves goes on.

    Unlike one that is drained, one that sleeps finishes its requests first: nothing is lost that gateways do not see.
    """
    engine = held.get(replica.name)
    return engine is not None, weight(engine) if engine is not None else (0, 0), -replica.ready_at


def _in_phase(phase: Phase, replicas: list[ReplicaObservation]) -> list[ReplicaObservation]:
    return [replica for replica in replicas if replica.phase == phase]


async def call_engine(session: aiohttp.ClientSession, control_url: str, token: str, call: Call) -> str:
    """Why the engine refused or did not answer; empty: it sleeps or wakes, or will when its requests are done."""
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
