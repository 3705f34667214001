"""Renders the engine's settings file and its list of adapters as ConfigMaps, and its tokens as a Secret.

The settings' ConfigMap is named after its content and never changes, so a changed setting changes the pod template. The
list of adapters and the Secret, which has the model's names too, change in place, so new adapters, other names and a
token rotation restart nothing.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Sequence

import msgspec

from pagemill_operator.backends.kubernetes.render.model import keeps_kernels, opened_source
from pagemill_operator.backends.kubernetes.render.names import adapters_name, child, config_name, token_name
from pagemill_operator.backends.kubernetes.snapshot import Manifest, Owner, RenderContext
from pagemill_operator.plan.pod_template import ADAPTERS_PATH, KERNELS_PATH, SETTINGS_PATH, TLS_PATH, TOKEN_PATH
from pagemill_operator.plan.types import Plan
from pagemill_protocol.engine_ports import TLS_CONTROL_PORT, TLS_DATA_PORT
from pagemill_protocol.report.adapters import NAMES_FILE, ModelNames, WantedAdapters

SETTINGS_FILE, ADAPTERS_FILE = "settings.json", "adapters.json"
TOKENS_FILE = "tokens"
TERMINATION_LOG = "/dev/termination-log"


def settings_path() -> str:
    return f"{SETTINGS_PATH}/{SETTINGS_FILE}"


def settings_text(plan: Plan, context: RenderContext) -> str:
    """Return the planned settings with a pod's addresses, its token file and the path of its model."""
    content = copy.deepcopy(plan.groups[0].process.settings)
    # Another text restarts engines, so those that IPv4 reaches keep theirs; with both families the first one counts.
    every_address = "::" if context.prefers_ipv6 else "0.0.0.0"
    # Other names must not change the pods: engines read them beside their tokens. Earlier versions ignore that file.
    content["engine"]["served_names"] = [plan.name]
    content["engine"]["model"] = opened_source(plan, plan.source)
    if plan.draft_source is not None:
        content["engine"]["speculative"]["source"] = opened_source(plan, plan.draft_source)
    if plan.serves_adapters:
        content["engine"]["adapters_file"] = f"{ADAPTERS_PATH}/{ADAPTERS_FILE}"
    if plan.pods_per_replica > 1:
        content["engine"]["nodes"]["tokens_file"] = f"{TOKEN_PATH}/{TOKENS_FILE}"
    if keeps_kernels(plan):
        content["engine"]["kernel_cache_dir"] = KERNELS_PATH
    content["server"] |= {
        "host": every_address,
        "control_host": every_address,
        "internal_tokens_file": f"{TOKEN_PATH}/{TOKENS_FILE}",
        "termination_log": TERMINATION_LOG,
    }
    if context.engine_tls_secret:
        ports = engine_ports(plan, context)
        content["server"] |= {
            "port": ports["data"],
            "control_port": ports["control"],
            "tls": {"cert_file": f"{TLS_PATH}/tls.crt", "key_file": f"{TLS_PATH}/tls.key"},
        }
    return json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def engine_ports(plan: Plan, context: RenderContext) -> dict[str, int]:
    """Return the container's ports by name."""
    if context.engine_tls_secret:
        return {"data": TLS_DATA_PORT, "control": TLS_CONTROL_PORT}
    return plan.groups[0].process.ports


def render_config(plan: Plan, owner: Owner, context: RenderContext) -> Manifest:
    text = settings_text(plan, context)
    return child("v1", "ConfigMap", config_name(plan.name, text), owner, immutable=True, data={SETTINGS_FILE: text})


def render_adapters(plan: Plan, owner: Owner) -> Manifest:
    text = msgspec.json.encode(WantedAdapters(adapters=[*plan.adapters])).decode()
    return child("v1", "ConfigMap", adapters_name(plan.name), owner, data={ADAPTERS_FILE: text})


def render_tokens(owner: Owner, tokens: tuple[str, ...], names: Sequence[str] = ()) -> Manifest:
    """Render the accepted tokens, one per line, the newest first, and the model's names if they are known."""
    data = {TOKENS_FILE: base64.b64encode("".join(f"{token}\n" for token in tokens).encode()).decode()}
    if names:
        data[NAMES_FILE] = base64.b64encode(msgspec.json.encode(ModelNames(names=[*names]))).decode()
    return child("v1", "Secret", token_name(owner.name), owner, type="Opaque", data=data)
