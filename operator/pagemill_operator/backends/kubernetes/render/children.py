"""All children of one `LLMDeployment`, in the order in which they are needed."""

from __future__ import annotations

from collections.abc import Iterator

from pagemill_operator.backends.kubernetes.render.config import render_config, render_tokens
from pagemill_operator.backends.kubernetes.render.deployment import render_deployment, render_disruption_budget
from pagemill_operator.backends.kubernetes.render.loader import render_claim, render_loader
from pagemill_operator.backends.kubernetes.render.network import (
    render_network_policy,
    render_pod_monitor,
    render_service,
)
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext
from pagemill_operator.plan.types import Plan


def render_children(plan: Plan, owner: Owner, context: RenderContext) -> list[Manifest]:
    """Every child that is wanted now; the engine Deployment comes last, once its model is there."""
    return list(_children(plan, owner, context))


def _children(plan: Plan, owner: Owner, context: RenderContext) -> Iterator[Manifest]:
    # First what limits, then what runs: no pod is ever reachable by everybody.
    yield render_network_policy(plan, owner, context)
    yield render_service(plan, owner)
    yield render_tokens(owner, context.tokens)
    if plan.cache is not None:
        if plan.cache.claim_name is None:
            yield render_claim(plan, owner, plan.cache)
        yield render_loader(plan, owner, context)
    if plan.replicas > 1:
        yield render_disruption_budget(plan, owner)
    if context.has_pod_monitors:
        yield render_pod_monitor(plan, owner)
    if plan.cache is None or context.loader_done:
        yield render_config(plan, owner)
        yield render_deployment(plan, owner, context)
