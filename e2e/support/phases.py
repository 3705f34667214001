"""Measures the phases of a new engine pod from outside: from scheduled and started to warming and ready.

The pod's conditions have whole seconds only, so the pod and the engine's own `/readyz` are polled ten times a second.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from itertools import pairwise
from typing import Any

from support.deployments import Deployed
from support.waiting import until

from pagemill_protocol.engine_ports import engine_url

CONTROL_PORT = 8001
ENGINE_PHASES = ("loading", "first_token", "warming")
DURATIONS = {
    "asked": "decide_s",
    "created": "schedule_s",
    "scheduled": "pull_s",
    "started": "import_s",
    "loading": "load_s",
    "first_token": "first_token_s",
    "warming": "warm_s",
}
"""The name of the duration that begins at each moment."""


def of_new_pod(deployed: Deployed, known: set[str], started_s: float, timeout_s: float = 240) -> dict[str, float]:
    """Return the seconds of each phase, in order, of the one pod whose uid is not in `known`."""
    seen: dict[str, float] = {}

    def note(phase: str) -> None:
        seen.setdefault(phase, time.monotonic() - started_s)

    def ready() -> bool:
        pod = next((pod for pod in deployed.pods() if pod["metadata"]["uid"] not in known), None)
        if pod is None:
            return False
        note("created")
        if _holds(pod, "PodScheduled"):
            note("scheduled")
        if any("running" in each["state"] for each in pod["status"].get("containerStatuses", [])):
            note("started")
            note(_engine_phase(pod))
        if _holds(pod, "Ready"):
            note("ready")
        return "ready" in seen

    until("the new pod is ready", ready, timeout_s=timeout_s)
    seen.pop("unknown", None)
    return _durations(seen)


def _durations(seen: dict[str, float]) -> dict[str, float]:
    """Return the times from each recorded moment to the next one."""
    order = sorted(seen.items(), key=lambda item: item[1])
    starts = [("asked", 0.0), *order]
    named = {DURATIONS[phase]: end - start for (phase, start), (_, end) in pairwise(starts)}
    return {**named, "total_s": order[-1][1]}


def _holds(pod: dict[str, Any], condition: str) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == condition and each["status"] == "True" for each in conditions)


def _engine_phase(pod: dict[str, Any]) -> str:
    url = f"{engine_url(pod['status'].get('podIP', ''), CONTROL_PORT)}/readyz"
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        body = error.read()
    except (OSError, ValueError):
        return "unknown"
    phase = json.loads(body).get("phase")
    return phase if phase in ENGINE_PHASES else "unknown"
