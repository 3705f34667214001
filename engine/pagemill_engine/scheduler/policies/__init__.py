"""Order of prefills, of those that wait and those that run. A policy is one function from a request to its rank.

The smallest rank is first, and it never changes while the request lives. Every rank starts with a time that only
grows from one arrival to the next, so nobody is overtaken for ever, whoever else keeps coming.
"""

from __future__ import annotations

from pagemill_engine.scheduler.policies import fcfs, priority, shortest_prefill_first
from pagemill_engine.scheduler.rows import OrderKey

POLICIES: dict[str, OrderKey] = {
    "fcfs": fcfs.rank,
    "priority": priority.rank,
    "shortest-prefill-first": shortest_prefill_first.rank,
}
