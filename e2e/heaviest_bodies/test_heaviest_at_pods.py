"""The heaviest bodies that a gateway's data port accepts kill no gateway pod with the chart's limit of 1 GiB.

The test measures the memory of the cgroup, whose limit the kernel enforces. `tests/http_servers` covers every route
with limits on CPU time and waits.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import llmdeployment
from support.processes import restart_count
from support.release import Release

LIMIT = "1Gi"
CONTEXT = 8192
MODEL = "chat"
TIMEOUT_S = 120.0
MOST_BODY_BYTES = 8 * 1024 * 1024
LONG = "word " * (CONTEXT - 512)
JUNK = b'{"x":"' + b"x" * (MOST_BODY_BYTES - 8) + b'"}'
PEAK = """
import pathlib
root = pathlib.Path("/sys/fs/cgroup")
paths = root / "memory.peak", root / "memory/memory.max_usage_in_bytes"
print(next(path for path in paths if path.exists()).read_text())
"""
"""A script that prints the peak memory of the container, with cgroup v2 or v1."""


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


BODIES: dict[str, Callable[[], bytes]] = {
    "/v1/chat/completions": lambda: body(messages=said(LONG), max_tokens=1),
    "/v1/completions": lambda: body(prompt=["word " * 1000] * 1024, max_tokens=1, stream=True),
    "/v1/messages": lambda: body(messages=said(LONG), max_tokens=1),
    "/v1/responses": lambda: body(input=LONG, max_output_tokens=1),
    "/v1/messages/count_tokens": lambda: body(messages=said(LONG)),
    "/tokenize": lambda: body(prompt=LONG, return_token_strs=True),
    "/detokenize": lambda: body(tokens=[49000] * CONTEXT),
}


def test_the_heaviest_bodies_kill_no_gateway(release: Release, space: Kubectl) -> None:
    deploy(space, llmdeployment(MODEL, engine={"maxModelLen": CONTEXT, "kvCacheMemory": "512Mi"})).wait_ready(1)
    base = release.service(MODEL)
    before = {pod["metadata"]["name"]: restart_count(pod) for pod in release.pods("gateway")}
    statuses = {}
    for path, make in BODIES.items():
        url = base.base_url.removesuffix("/v1") + path
        statuses[path] = [_posted(url, content, base.api_key) for content in (make(), JUNK)]
    assert all(400 <= refused < 500 for _, refused in statuses.values()), (
        f"8 MB without a known field were accepted: {statuses}"
    )
    too_many = {"/v1/completions": {200, 429, 503}}  # more prompts than may wait at this engine
    assert all(found in too_many.get(path, {200}) for path, (found, _) in statuses.items()), statuses
    pods = release.pods("gateway")
    assert {pod["metadata"]["name"]: restart_count(pod) for pod in pods} == before
    for pod in pods:
        assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == LIMIT
        peak = release.cluster.kubectl.within(release.namespace).ok(
            "exec", pod["metadata"]["name"], "--", "python", "-c", PEAK
        )
        assert int(peak) < 1024**3


def _posted(url: str, content: bytes, key: str) -> int:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, content, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read1()  # closing early would abort the rest; a CPU engine takes minutes for a million tokens
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
