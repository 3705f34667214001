"""Leader election by a Lease: one operator writes, the others wait with warm caches.

The rules are those of client-go: a Lease may be taken over when its record has not changed for its duration on *our*
clock (clocks are never compared). The leader's right to write ends `renew_deadline_s` after the start of its last
successful renewal, before another process can take over: every write checks `remaining_s`. A leader whose Lease another
process has taken exits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.backends.kubernetes.kinds import LEASE

logger = logging.getLogger("pagemill.operator.lease")

Record = dict[str, Any]


def boot_time_s() -> float:
    """Return monotonic seconds that include the machine's sleep, if the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeaseStore(Protocol):
    """One Lease object. Its methods raise `ApiError` and `Unreachable`."""

    async def read(self, timeout_s: float) -> Record | None: ...
    async def create(self, record: Record, timeout_s: float) -> Record: ...
    async def replace(self, record: Record, timeout_s: float) -> Record:
        """Replace the Lease with the record's resourceVersion as precondition."""


@dataclass(frozen=True)
class LeaseSettings:
    identity: str
    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_period_s: float = 2.0


class Leadership:
    """The right to write, which expires. Everything that writes shares it."""

    def __init__(self, renew_deadline_s: float, clock: Callable[[], float] = boot_time_s) -> None:
        self._renew_deadline_s = renew_deadline_s
        self._clock = clock
        self._renewed_at: float | None = None

    def remaining_s(self) -> float:
        """Return the seconds for which writing is still allowed; 0 if this process is not the leader."""
        if self._renewed_at is None:
            return 0.0
        return max(0.0, self._renewed_at + self._renew_deadline_s - self._clock())

    def renewed(self, at: float) -> None:
        self._renewed_at = at

    def give_up(self) -> None:
        self._renewed_at = None


class LeaderElection:
    """Leader election: `acquire` until this process leads, `hold` until it is lost; `release` at an orderly end."""

    def __init__(
        self,
        settings: LeaseSettings,
        store: LeaseStore,
        leadership: Leadership,
        *,
        clock: Callable[[], float] = boot_time_s,
        sleep: Callable[[float], Any] = asyncio.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._store = store
        self._leadership = leadership
        self._clock = clock
        self._sleep = sleep
        self._now = now
        self._record: Record | None = None
        """The record as it was last seen or written."""
        self._seen_at = 0.0
        """When `_record` was first seen in this state."""
        self._seen_spec: Record | None = None

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        while True:
            try:
                if await self._try_acquire():
                    logger.info("%s is the leader", self._settings.identity)
                    return
            except (ApiError, Unreachable) as error:
                logger.warning("the Lease cannot be read or taken: %s", error)
                # Without a read it is unknown for how long the holder has not renewed the Lease.
                self._seen_spec = None
            await self._sleep(self._pause_s())

    async def hold(self, on_change: Callable[[bool], None] = lambda leads: None) -> str:
        """Renew the Lease until another process holds it; return a message that names that process.

        If it cannot be renewed in time (the API server is away), leadership is only suspended: nothing may be written,
        but a Lease that still names this process when it can be read again was not held by another one in between.
        `on_change` is called when leadership is suspended or resumed.
        """
        leads = True
        while True:
            await self._sleep(self._settings.retry_period_s)
            try:
                if not await self._renew():
                    self._leadership.give_up()
                    return f"the Lease is held by {self._holder() or 'no process'} now"
            except (ApiError, Unreachable) as error:
                # Once leadership is suspended, a long outage must not fill the log.
                level = logging.WARNING if leads else logging.DEBUG
                logger.log(level, "the Lease was not renewed, %.1f s remain: %s", self._leadership.remaining_s(), error)
            if leads != (self._leadership.remaining_s() > 0):
                leads = not leads
                logger.warning("leadership %s", "resumed" if leads else "is suspended: nothing is written")
                on_change(leads)

    async def release(self) -> None:
        """Let another operator take over at once. After this call nothing may be written."""
        may_release = self._leadership.remaining_s() > 0
        self._leadership.give_up()
        if not may_release or self._record is None:
            return
        spec = {**self._record["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._timestamp()}
        try:
            await self._store.replace({**self._record, "spec": spec}, self._settings.retry_period_s)
        except (ApiError, Unreachable) as error:
            logger.warning("the Lease was not released; it expires by itself: %s", error)

    async def _try_acquire(self) -> bool:
        started = self._clock()
        record = await self._store.read(self._settings.renew_deadline_s / 2)
        if record is not None:
            self._see(record)
            if not self._may_acquire(record["spec"]):
                return False
        write = self._store.create if record is None else self._store.replace
        try:
            return self._took(await write(self._claim(record), self._timeout_s(started)), started)
        except ApiError as error:
            # Another process was faster.
            if error.status == 409:
                return False
            raise

    async def _renew(self) -> bool:
        """Renew the Lease; return False if another process holds it. The renewal counts from before the request."""
        if self._leadership.remaining_s() <= 0:
            # It is too late to renew the known record: other processes may have written in the meantime.
            return await self._renew_known(await self._store.read(self._settings.renew_deadline_s / 2))
        started = self._clock()
        timeout_s = min(self._settings.renew_deadline_s / 2, self._leadership.remaining_s())
        try:
            self._took(await self._store.replace(self._renewal(self._record), timeout_s), started)
            return True
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        # It was written in the meantime, perhaps by an own request whose answer was lost.
        return await self._renew_known(await self._store.read(timeout_s))

    async def _renew_known(self, record: Record | None) -> bool:
        self._record = record
        if record is None or record["spec"].get("holderIdentity") != self._settings.identity:
            return False
        started = self._clock()
        self._took(await self._store.replace(self._renewal(record), self._settings.renew_deadline_s / 2), started)
        return True

    def _renewal(self, record: Record | None) -> Record:
        record = record or {}
        return {**record, "spec": {**record.get("spec", {}), "renewTime": self._timestamp()}}

    def _took(self, record: Record, started: float) -> bool:
        # A process that was paused must not count a renewal that returned too late.
        if self._clock() - started >= self._settings.renew_deadline_s:
            return False
        self._record = record
        self._leadership.renewed(started)
        return True

    def _see(self, record: Record) -> None:
        if record["spec"] != self._seen_spec:
            self._seen_spec, self._seen_at = record["spec"], self._clock()
        self._record = record

    def _may_acquire(self, spec: Record) -> bool:
        holder = spec.get("holderIdentity")
        if not holder or holder == self._settings.identity:
            return True
        return self._clock() >= self._seen_at + self._duration_s(spec)

    def _pause_s(self) -> float:
        """Return the seconds until the next read, or until the Lease expires if that is sooner."""
        period_s = self._settings.retry_period_s
        if self._seen_spec is None or not self._seen_spec.get("holderIdentity"):
            return period_s
        runs_out_s = self._seen_at + self._duration_s(self._seen_spec) - self._clock()
        return min(period_s, runs_out_s) if runs_out_s > 0 else period_s

    def _duration_s(self, spec: Record) -> float:
        return float(spec.get("leaseDurationSeconds") or self._settings.duration_s)

    def _timeout_s(self, started: float) -> float:
        return max(0.1, self._settings.renew_deadline_s - (self._clock() - started))

    def _claim(self, record: Record | None) -> Record:
        before = record["spec"] if record else {}
        again = before.get("holderIdentity") == self._settings.identity
        now = self._timestamp()
        spec = {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": max(1, round(self._settings.duration_s)),
            "acquireTime": before.get("acquireTime", now) if again else now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (0 if again or record is None else 1),
        }
        return {**(record or {}), "spec": spec}

    def _holder(self) -> str:
        return str((self._record or {}).get("spec", {}).get("holderIdentity") or "")

    def _timestamp(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class KubernetesLease:
    """The Lease object. Its requests do not check the leadership, because they are what renews it."""

    def __init__(self, client: Client, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name

    async def read(self, timeout_s: float) -> Record | None:
        path = LEASE.path(self._namespace, self._name)
        try:
            return await self._client.request("GET", path, timeout_s=timeout_s)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def create(self, record: Record, timeout_s: float) -> Record:
        body = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": {"namespace": self._namespace, "name": self._name},
            **record,
        }
        return await self._client.request("POST", LEASE.path(self._namespace), body=body, timeout_s=timeout_s)

    async def replace(self, record: Record, timeout_s: float) -> Record:
        path = LEASE.path(self._namespace, self._name)
        return await self._client.request("PUT", path, body=record, timeout_s=timeout_s)
