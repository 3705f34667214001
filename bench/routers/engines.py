"""Real engine servers on a simulated device, as upstreams for comparing which one a router chooses.

Scheduler, KV manager, prefix cache and HTTP are real. A step waits as long as a step of an 8B model on a GPU would
take, times a slowdown, so that two cores can run four pods without limiting the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from peers.process import PeerFailed, PeerProcess
from workload import MODEL as SOURCE

from pagemill_operator.backends.local.ports import free_port
from routers.catalogue import MODEL

START_TIMEOUT_S = 180.0
TOKEN = "bench-internal"
KNOTS_TOKENS = (1, 64, 512, 2048)
KNOT_MS = (6.0, 8.0, 22.0, 80.0)


class Engines(NamedTuple):
    data_ports: list[int]
    control_ports: list[int]


@contextmanager
def engines(num_pods: int, slowdown: float, folder: Path) -> Iterator[Engines]:
    """Yield ready engines with empty caches. Raises `PeerFailed`."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = Engines([free_port() for _ in range(num_pods)], [free_port() for _ in range(num_pods)])
    processes: list[PeerProcess] = []
    try:
        for number, (data, control) in enumerate(zip(*ports, strict=True)):
            path = folder / f"engine-{number}.json"
            path.write_text(json.dumps(settings(data, control, slowdown)))
            argv = [sys.executable, "-m", "pagemill_engine.server", "--settings", str(path)]
            processes.append(PeerProcess(argv, {}, folder / f"engine-{number}.log"))
        for process, control in zip(processes, ports.control_ports, strict=True):
            process.wait_http(f"http://127.0.0.1:{control}/readyz", START_TIMEOUT_S)
        yield ports
        if any(process.ended for process in processes):
            raise PeerFailed("an engine ended")
    finally:
        for process in processes:
            process.stop()


def settings(data_port: int, control_port: int, slowdown: float) -> dict[str, object]:
    step_time = {
        "knots_tokens": list(KNOTS_TOKENS),
        "knot_ms": [slowdown * each for each in KNOT_MS],
        "decode_context_ms": slowdown * 1e-5,
        "chunk_context_ms": slowdown * 1e-7,
    }
    engine = {
        "model": SOURCE,
        "served_names": [MODEL],
        "null_runner": True,
        "num_kv_blocks": 2500,
        "max_model_len": 16384,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 512,
        "max_num_waiting": 100_000,
        "step_time": step_time,
    }
    server = {"port": data_port, "control_port": control_port, "internal_token": TOKEN, "drain_timeout_s": 1.0}
    return {"engine": engine, "server": server}
