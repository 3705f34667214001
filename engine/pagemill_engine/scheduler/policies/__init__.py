"""Order of the waiting queue. A policy is one function from a request to a sort key; smallest first."""

from __future__ import annotations

from pagemill_engine.scheduler.policies import fcfs, priority
from pagemill_engine.scheduler.rows import OrderKey

POLICIES: dict[str, OrderKey] = {"fcfs": fcfs.waiting_key, "priority": priority.waiting_key}
