"""Spec to plan, a pure function: no clock, no disk, no network, no cluster library.

`planner.make_plan` is the door; `types` says what a plan is. Backends turn a plan into processes or pods.
"""

from pagemill_operator.plan.planner import make_plan
from pagemill_operator.plan.types import Group, Plan, Probe, Problem, Process

__all__ = ["Group", "Plan", "Probe", "Problem", "Process", "make_plan"]
