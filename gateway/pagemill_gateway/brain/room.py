"""Whether one engine has room for one more request, by its latest report and what this gateway has sent since.

Seats: our own sequences are counted exactly, those of others by the reports. Blocks: what is free or evictable, less
what rows there still have to compute, less what was sent and is not in a report yet, less the growth that our answers
there are expected to have. Of an engine whose reports are old only our own reservations count, and what it never told
does not bind: the engine itself refuses in the end. An engine with nothing to do always has room.
"""

from __future__ import annotations

from pagemill_gateway.admission.reservations import Need, Reservations
from pagemill_gateway.brain.registry import EndpointRecord
from pagemill_protocol.state import EngineLoad


def has_room(record: EndpointRecord, need: Need, now: float) -> bool:
    if not record.fullness.allows(record.in_flight, now):
        return False
    frame = record.reports.latest
    if frame is None:
        return True
    fresh = record.reports.fresh(now)
    num_there = record.reserved.num_sequences + (record.reports.external() if fresh else 0)
    if not num_there:
        return True
    if 0 < frame.max_num_seqs < num_there + need.num_sequences:
        return False
    total = frame.load.num_blocks_total
    if not total:
        return True
    wanted = min(total, need.num_blocks(record.block_size))
    if not fresh:
        return record.reserved.num_blocks + wanted <= total
    return wanted <= num_blocks_left(frame.load, record.reserved, record.block_size)


def num_blocks_left(load: EngineLoad, reserved: Reservations, block_size: int) -> int:
    """By a report and what was sent since: what another request may still take."""
    growing = _num_tokens_to_come(load, reserved) + load.num_tokens_waiting
    # A sequence's last block is seldom full, so each may need one more than its tokens say.
    num_growing_blocks = -(-growing // block_size) + reserved.num_seen_sequences
    return load.num_blocks_free + load.num_blocks_evictable - reserved.num_unseen_blocks - num_growing_blocks


def _num_tokens_to_come(load: EngineLoad, reserved: Reservations) -> int:
    """Of our requests that reports show, with their expected output, what is neither computed nor due by the report."""
    if not reserved.num_seen_sequences:
        return 0
    num_rows = max(1, load.num_requests_running + load.num_requests_waiting)
    share = min(1.0, reserved.num_seen_sequences / num_rows)
    num_there = int(share * (load.num_tokens_running + load.num_tokens_waiting))
    return max(0, reserved.num_seen_prompt_tokens + reserved.num_seen_output_tokens - num_there)
