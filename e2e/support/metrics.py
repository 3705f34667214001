"""Reads Prometheus metrics of a pod from outside, where pod addresses are reachable."""

from __future__ import annotations

import urllib.request
from typing import Any

from pagemill_protocol.engine_ports import engine_url

TIMEOUT_S = 10.0


def read(pod: dict[str, Any], port: int) -> str:
    url = engine_url(pod["status"]["podIP"], port)
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
        text: str = answer.read().decode()
        return text


def total(pod: dict[str, Any], port: int, name: str, /, **labels: str) -> float:
    """Return the sum of all series with that name and those labels, or 0 without any."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    values = [
        float(line.rpartition(" ")[2])
        for line in read(pod, port).splitlines()
        if line.split("{")[0].split(" ")[0] == name and all(label in line for label in wanted)
    ]
    return sum(values)
