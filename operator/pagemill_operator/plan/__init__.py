"""Turns a spec into a plan. Pure functions: no clock, disk, network or cluster library.

The entry point is `planner.make_plan`; `types` defines the plan. Backends turn a plan into processes or pods.
"""

from pagemill_operator.plan.planner import make_plan
from pagemill_operator.plan.types import Group, Plan, Probe, Problem, Process

__all__ = ["Group", "Plan", "Probe", "Problem", "Process", "make_plan"]
