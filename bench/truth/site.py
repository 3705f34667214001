"""The real system: one engine of the embedded model, a gateway in front of it, and the load generator, each a process.

The engine computes with one thread on one core; its HTTP process, the gateway and the generator have the others. What
the simulator must know of the engine comes from its state frames, as a gateway reads them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from peers.process import PeerFailed, PeerProcess
from processes import give_cores
from report import ROOT
from routers.catalogue import KEY, MODEL, Site, start_pagemill
from workload import MODEL as SOURCE

from pagemill_engine.config import EngineConfig
from pagemill_operator.backends.local.ports import free_port
from pagemill_protocol.frames import StateDecoder
from pagemill_protocol.report.state import StateFrame
from pagemill_protocol.versions import protocol_headers
from pagemill_servers.secrets.token_file import read_generated_token
from truth.generator import Answer, Request

START_TIMEOUT_S = 180.0
MARGIN_S = 240.0
"""Seconds for answers that are open when the last request was sent."""
MAX_MODEL_LEN = 2048
THREADS = 1
POLL_S = 0.2
WARM_UP = [Request(at_s=0.01 * n, prompt=list(range(100 + n, 140 + n)), num_tokens=8) for n in range(16)]
"""Requests that open connections and run the code once."""


@dataclass
class RealSite:
    engine: PeerProcess
    control_url: str
    generator: PeerProcess
    gateway_url: str
    folder: Path

    def replay(self, requests: Sequence[Request]) -> list[Answer]:
        """Play every request at its time, to the last token. Raise `PeerFailed`."""
        path = self.folder / "requests.json"
        path.write_bytes(msgspec.json.encode(requests))
        job = {"url": self.gateway_url, "model": MODEL, "key": KEY, "requests": str(path)}
        reported = self.generator.ask(job, requests[-1].at_s + MARGIN_S)
        if "failed" in reported:
            raise PeerFailed(reported["failed"])
        return msgspec.convert(reported["answers"], list[Answer])

    def state(self) -> StateFrame:
        """Return the engine's latest state frame: its capacity and its step times."""
        decoder = StateDecoder()
        headers = {"Authorization": f"Bearer {read_generated_token(self.control_url)}", **protocol_headers()}
        request = urllib.request.Request(f"{self.control_url}/internal/state", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            while True:
                frames = decoder.feed(response.read1(65536))
                if frames:
                    return frames[-1]


def engine_of(state: StateFrame) -> EngineConfig:
    """Return the simulator's engine settings: the same capacity, and the step times that the engine has learned."""
    return EngineConfig(
        model="measured",
        num_kv_blocks=state.load.num_kv_bytes_total // (sum(kind.block_bytes for kind in state.kinds) or 1),
        block_size=state.block_size,
        max_model_len=state.max_model_len,
        max_num_seqs=state.max_num_seqs,
        max_num_batched_tokens=state.max_num_batched_tokens,
        step_time=state.step_time,
        overlap=False,  # the CPU engine's default
    )


@contextmanager
def real_site(folder: Path) -> Iterator[RealSite]:
    """Start everything; yield the site once some requests have been answered."""
    with _engine(folder) as (engine, port, control_port), _generator(folder) as generator:
        start = start_pagemill(Site([port], folder, max_streams=256, controls=[control_port]))
        gateway = PeerProcess(start.argv, start.environment, folder / "gateway.log")
        try:
            give_cores([engine.pid], [gateway.pid, generator.pid])
            control_url, url = f"http://127.0.0.1:{control_port}", f"http://127.0.0.1:{start.port}"
            site = RealSite(engine, control_url, generator, url, folder)
            _warm(site, gateway)
            yield site
        finally:
            gateway.stop()


@contextmanager
def _engine(folder: Path) -> Iterator[tuple[PeerProcess, int, int]]:
    port, control_port = free_port(), free_port()
    settings = {
        "engine": {"model": SOURCE, "served_names": [MODEL], "max_model_len": MAX_MODEL_LEN, "num_threads": THREADS},
        "server": {"port": port, "control_port": control_port},
    }
    path = folder / "engine.json"
    path.write_text(json.dumps(settings))
    argv = [sys.executable, "-m", "pagemill_engine.server", "--settings", str(path)]
    engine = PeerProcess(argv, {}, folder / "engine.log")
    try:
        engine.wait_http(f"http://127.0.0.1:{control_port}/readyz", START_TIMEOUT_S)
        yield engine, port, control_port
    finally:
        engine.stop()


@contextmanager
def _generator(folder: Path) -> Iterator[PeerProcess]:
    paths = os.pathsep.join([str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])])
    generator = PeerProcess([sys.executable, "-m", "truth.generator"], {"PYTHONPATH": paths}, folder / "generator.log")
    try:
        yield generator
    finally:
        generator.stop()


def _warm(site: RealSite, gateway: PeerProcess) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            site.replay(WARM_UP)
            return
        except PeerFailed as failure:
            if gateway.ended or time.monotonic() > deadline:
                raise PeerFailed(gateway.why_ended() if gateway.ended else str(failure)) from None
        time.sleep(POLL_S)
