"""Scheduling policies: the order of running and waiting prefills.

A policy is a function from a sequence to its rank. The smallest rank is first, and a rank never changes. Every rank
starts with a time that only grows from one arrival to the next, so no sequence is overtaken for ever.
"""

from __future__ import annotations

from pagemill_engine.scheduler.order import fcfs, priority, shortest_prefill_first
from pagemill_engine.scheduler.order.sorted_sequences import OrderKey

POLICIES: dict[str, OrderKey] = {
    "fcfs": fcfs.rank,
    "priority": priority.rank,
    "shortest-prefill-first": shortest_prefill_first.rank,
}
