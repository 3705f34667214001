"""Computes how many low-priority requests the engines of a model can take now. Pure functions.

An engine gets at most one at a time, because a live request would wait for the prompts of all that share its step.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_gateway.brain.endpoints.deployment import DeploymentRecord
from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.brain.queue.queues import Queues

UNREPORTED_MAX_SEQS = 8
"""The assumed `max_num_seqs` of engines that do not report it."""


def idle_capacity(deployments: Sequence[DeploymentRecord], queues: Queues, max_load: float, now: float) -> int:
    """Return the number of low-priority requests that the deployments' engines can take now.

    `max_load` is the share of an engine's sequence slots and blocks up to which it may be filled.
    """
    if not all(queues.is_empty(each.key) for each in deployments):
        return 0
    records = [record for each in deployments for record in each.records if record.usable]
    return sum(_left(record, max_load, now) for record in records if record.reports.fresh(now))


def _left(record: EndpointRecord, max_load: float, now: float) -> int:
    frame = record.reports.latest
    if frame is None or frame.load.num_requests_waiting:
        return 0
    load = frame.load
    if load.num_blocks_active > max_load * load.num_blocks_total:
        return 0
    most = int(max_load * (frame.max_num_seqs or UNREPORTED_MAX_SEQS))
    return int(most > record.reserved.num_sequences + record.load_elsewhere(now))
