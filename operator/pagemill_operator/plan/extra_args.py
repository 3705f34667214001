"""`spec.engine.extraArgs`: engine settings that have no field in the resource, as `--name=value`.

The table below is the allowed part of the engine's and the server's settings; a test compares it with the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from pagemill_crds.invalid import usable
from pagemill_operator.plan.types import Problem

FIELD = "spec.engine.extraArgs"


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return text.lower() == "true"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("write a number of at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError("write a number of seconds above 0")
    return value


def _object(text: str) -> Any:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("write a JSON object")
    return value


def _policy(text: str) -> str:
    if text not in ("fcfs", "priority", "shortest-prefill-first"):
        raise ValueError("write fcfs, priority or shortest-prefill-first")
    return text


def _generation_config(text: str) -> str:
    if text not in ("auto", "vllm"):
        raise ValueError("write auto or vllm")
    return text


def _control_tokens(text: str) -> str:
    if text not in ("text", "tokens"):
        raise ValueError("write text or tokens")
    return text


def _hosted_tools(text: str) -> str:
    if text not in ("ignore", "refuse"):
        raise ValueError("write ignore or refuse")
    return text


SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "policy": ("engine", _policy),
    "max_num_waiting": ("engine", _count),
    "max_answer_values": ("engine", _count),
    "max_form_chars": ("engine", _count),
    "chat_control_tokens": ("engine", _control_tokens),
    "hosted_tools": ("engine", _hosted_tools),
    "overlap": ("engine", _flag),
    "cuda_graphs": ("engine", _flag),
    "generation_config": ("engine", _generation_config),
    "num_threads": ("engine", _count),
    "num_kv_blocks": ("engine", _count),
    "seed": ("engine", int),
    "null_runner": ("engine", _flag),
    "vocab_size": ("engine", _count),
    "step_time": ("engine", _object),
    "max_body_bytes": ("server", _count),
    "max_header_bytes": ("server", _count),
    "max_in_flight_body_bytes": ("server", _count),
    "max_unread_bytes": ("server", _count),
    "body_timeout_s": ("server", _seconds),
    "idle_connection_timeout_s": ("server", _count),
}
"""Setting -> (section of the settings file, parser of its text)."""

IGNORED_UNLESS: dict[str, tuple[str, Any, str]] = {
    "cuda_graphs": ("device", "cuda", "only a GPU runs CUDA graphs; set spec.resources.gpus to 1, or remove it"),
    "vocab_size": ("null_runner", True, "only a simulated device needs it; add --null-runner, or remove it"),
    "step_time": ("null_runner", True, "only a simulated device needs it; add --null-runner, or remove it"),
}
"""Engine setting that has no effect -> (the other setting, the value of that setting with which it has one, remedy)."""


def apply_extra_args(arguments: list[str], settings: dict[str, dict[str, Any]]) -> list[Problem]:
    """Write the arguments into `settings`; return the problems of those that are invalid."""
    problems = []
    for index, argument in usable(arguments):
        message = _apply(argument, settings)
        if message:
            problems.append(Problem(f"{FIELD}[{index}]", argument, message))
    return problems


def _apply(argument: str, settings: dict[str, dict[str, Any]]) -> str | None:
    option, has_value, text = argument.removeprefix("--").partition("=")
    name = option.replace("-", "_")
    if name not in SETTINGS:
        near = get_close_matches(name, SETTINGS, n=1)
        known = ", ".join(f"--{setting.replace('_', '-')}" for setting in SETTINGS)
        hint = f"did you mean --{near[0].replace('_', '-')}?" if near else f"known: {known}"
        return f"no engine setting --{option}; {hint}"
    part, read = SETTINGS[name]
    if not has_value and read is not _flag:
        return f"--{option} needs a value: write --{option}=VALUE"
    try:
        settings[part][name] = read(text if has_value else "true")
    except ValueError as error:
        return f"--{option} cannot take {text[:80]!r}: {error}"
    return None
