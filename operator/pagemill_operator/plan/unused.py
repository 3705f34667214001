"""Fields of a plan whose effect only engines and gateways know: those that depend on the kind of the model, and the
routing policy, which packages may register.

Engines report the settings without effect to the gateways. Neighbour: `ignored` finds the fields without effect that
the spec itself shows.
"""

from __future__ import annotations

from collections.abc import Collection

from pagemill_operator.plan.ignored import short_value
from pagemill_operator.plan.types import Plan, Problem

_NO_TEXT = "the model generates no text; remove it"
_CHOOSE = "choose one of them, or install the package that registers the policy where the gateways run"
_NO_CACHE = "the model computes whole texts without a KV cache; remove it"
FIELDS = {
    "chat_template": ("spec.model.chatTemplate", _NO_TEXT),
    "generation_defaults": ("spec.model.generationDefaults", _NO_TEXT),
    "tool_call_parser": ("spec.model.toolCallParser", _NO_TEXT),
    "reasoning_parser": ("spec.model.reasoningParser", _NO_TEXT),
    "kv_cache_dtype": ("spec.engine.kvCacheDtype", _NO_CACHE),
    "kv_cache_memory_bytes": ("spec.engine.kvCacheMemory", _NO_CACHE),
}
"""Engine setting -> (field of the spec, cause and remedy)."""


def unused_fields(plan: Plan, settings: Collection[str], policies: Collection[str] = ()) -> list[Problem]:
    """Return the fields of the plan among the engine settings that have no effect with its model, and its routing
    policy unless it is among the gateways' `policies`; none given: it is."""
    set_here = plan.groups[0].process.settings["engine"]
    policy = plan.served.routing_policy
    unknown = f"gateways without a policy of this name use their default; they have {', '.join(policies)}: {_CHOOSE}"
    found = [Problem("spec.routing.policy", policy, unknown)] if policies and policy not in policies else []
    return found + [
        Problem(field, short_value(set_here[name]), message)
        for name, (field, message) in FIELDS.items()
        if name in settings and name in set_here
    ]
