"""Settings of the local backend; only this module reads its environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagemill_operator.backends.local.machine import visible_gpus
from pagemill_servers.process.cgroup import usable_cores
from pagemill_servers.process.settings import runtime_folder


@dataclass(frozen=True)
class LocalSettings:
    host: str = "127.0.0.1"
    """Address of the gateway's data port."""
    port: int = 8080
    """Data port of the gateway; 0 takes a free one."""
    api_keys: tuple[str, ...] = ()
    """Entries of the keys that clients must send (`HASH tenant=NAME ...`)."""
    api_keys_file: Path | None = None
    """File of further entries, which the gateway watches. Without any key clients need none; that is allowed on
    loopback only.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may address the gateway on loopback without keys."""
    python: str = sys.executable
    """Interpreter that runs engines and gateway."""
    runtime_folder: Path = field(default_factory=runtime_folder)
    """Folder in which the private state folder is created."""
    logs_folder: Path | None = None
    """Folder in which the logs stay when the backend has stopped, each time in place of the earlier ones; None: they
    are removed."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment that the processes start from."""
    cores: int = field(default_factory=usable_cores)
    """Cores shared by the engines that do not set their own number."""
    gpus: tuple[str, ...] = field(default_factory=lambda: visible_gpus(os.environ))
    """NVIDIA devices for engines that need one; if all are in use, the next engine shares one."""
    gateway_module: str = "pagemill_gateway"
    batches_directory: Path | None = None
    """Folder in which the gateway keeps files and batches; None: it accepts none."""
    gateway_workers: int = 1
    """Number of gateway processes that serve its data port."""
    stop_timeout_s: float = 5.0
    """Seconds that a process has after SIGTERM when the backend stops; then it gets SIGKILL."""
    readyz_interval_s: float = 0.1
    """Seconds between two `/readyz` requests to a process that is not ready."""
    watch_interval_s: float = 1.0
    """Seconds between two `/readyz` requests to a process that is ready."""
    backoff_first_s: float = 0.5
    backoff_longest_s: float = 30.0
    """Longest pause in seconds before a crashed process restarts; the pause doubles with each crash."""
    stable_after_s: float = 60.0
    """Seconds of readiness after which a process restarts with the first pause again."""
