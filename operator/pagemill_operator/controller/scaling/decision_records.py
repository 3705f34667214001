"""Stores the latest decisions on each deployment in a ConfigMap beside it, where its users may read them.

Reading them needs no access to the operator's pods, and an earlier leader's decisions are kept. They are written at
once, and then at most every `INTERVAL_S`. `scaling` adds records; `pagemill why` reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, NotLeading, Unreachable
from pagemill_operator.autoscaler.records import Record, encode_record, is_record
from pagemill_operator.backends.kubernetes.kinds import CONFIG_MAP
from pagemill_operator.backends.kubernetes.render.records import lines_of, records_name, render_records
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner
from pagemill_operator.backends.scaler import NUM_KEPT_RECORDS

logger = logging.getLogger("pagemill.operator.scaling")

INTERVAL_S = 10.0
RETRY_S = 30.0
MAX_BYTES = 256 * 1024
"""Largest size of one deployment's records in bytes; a ConfigMap may be four times as large."""


@dataclass
class _Kept:
    """The content, present or wanted, of one deployment's ConfigMap."""

    uid: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_RECORDS))
    is_ours: bool = False
    """Whether the ConfigMap was read and belongs to this deployment or did not exist."""
    fault: str = ""
    """Why the last write failed; empty if it succeeded."""


class DecisionRecords:
    def __init__(
        self,
        client: Client,
        owner: Callable[[str], Manifest | None],
        *,
        on_write: Callable[[str, str], None] = lambda kind, verb: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner` returns the LLMDeployment of a key; `on_write` is called with the kind and verb of each write."""
        self._client = client
        self._owner = owner
        self._on_write = on_write
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._unwritten: set[str] = set()
        self._due_at: dict[str, float] = {}
        """Key -> time before which it is not written again."""
        self._changed = asyncio.Event()

    def note(self, record: Record) -> None:
        owner = self._owner(record.key)
        if owner is None:
            return
        uid = owner["metadata"]["uid"]
        kept = self._kept.get(record.key)
        if kept is None or kept.uid != uid:
            kept = self._kept[record.key] = _Kept(uid)
        kept.lines.append(encode_record(record).decode())
        self._unwritten.add(record.key)
        self._changed.set()

    def forget(self, key: str) -> None:
        """Forget a deployment that is not scaled any more; the ConfigMap stays until its LLMDeployment is deleted."""
        self._kept.pop(key, None)
        self._due_at.pop(key, None)
        self._unwritten.discard(key)

    async def run(self) -> None:
        """Write records until cancelled."""
        while True:
            self._changed.clear()
            for key in sorted(key for key in self._unwritten if self._wait_s(key) <= 0):
                await self._write_due(key)
            timeout_s = min((self._wait_s(key) for key in self._unwritten), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

    def _wait_s(self, key: str) -> float:
        return self._due_at.get(key, 0.0) - self._clock()

    async def _write_due(self, key: str) -> None:
        owner, kept = self._owner(key), self._kept.get(key)
        if owner is None or kept is None or owner["metadata"]["uid"] != kept.uid:
            self.forget(key)
            return
        self._unwritten.discard(key)
        self._due_at[key] = self._clock() + INTERVAL_S
        try:
            await self._write(owner, kept)
        except (ApiError, Unreachable, NotLeading) as error:
            # The decisions take effect nevertheless.
            self._unwritten.add(key)
            self._due_at[key] = self._clock() + RETRY_S
            self._log_once(key, kept, str(error) or "another operator leads")
        except Exception:
            # An error of one deployment must not stop the others.
            logger.exception("the decisions on %s could not be stored", key)
        else:
            kept.fault = ""

    def _log_once(self, key: str, kept: _Kept, fault: str) -> None:
        """Log a failure once, however often the write is retried."""
        if fault != kept.fault:
            logger.warning("the decisions on %s could not be stored, trying again: %s", key, fault)
        kept.fault = fault

    async def _write(self, owner: Manifest, kept: _Kept) -> None:
        metadata = owner["metadata"]
        if not kept.is_ours:
            found = await self._client.find(CONFIG_MAP, metadata["namespace"], records_name(metadata["name"]))
            if found is not None:
                self._join(found, kept)
            kept.is_ours = True
        lines = _newest(kept.lines)
        manifest = render_records(Owner(metadata["namespace"], metadata["name"], metadata["uid"]), lines)
        self._on_write(CONFIG_MAP.name, "apply")
        await self._client.apply(CONFIG_MAP, manifest, force=True)

    def _join(self, found: Manifest, kept: _Kept) -> None:
        """Prepend what an earlier leader wrote. Raise `ApiError` if the ConfigMap belongs to something else."""
        metadata = found["metadata"]
        if kept.uid not in {reference["uid"] for reference in metadata.get("ownerReferences") or []}:
            where = f"{metadata['namespace']}/{metadata['name']}"
            raise ApiError(
                409, "AlreadyExists", f"ConfigMap {where} does not belong to this LLMDeployment; delete or rename it"
            )
        # Records of another operator version may have other fields, which `pagemill why` could not read.
        earlier = [line for line in lines_of(found) if is_record(line.encode())]
        kept.lines = deque([*earlier, *kept.lines], maxlen=NUM_KEPT_RECORDS)


def _newest(lines: deque[str]) -> list[str]:
    """Return the latest lines that fit into `MAX_BYTES`."""
    kept: list[str] = []
    remaining = MAX_BYTES
    for line in reversed(lines):
        remaining -= len(line.encode()) + 1
        if remaining < 0:
            break
        kept.append(line)
    return kept[::-1]
