"""Settings of the local backend, and the only place where it reads an environment of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagemill_operator.backends.local.machine import visible_gpus
from pagemill_protocol.cgroup import usable_cores
from pagemill_protocol.settings import runtime_folder


@dataclass(frozen=True)
class LocalSettings:
    host: str = "127.0.0.1"
    """Address of the gateway's data port."""
    port: int = 8080
    """Data port of the gateway; 0 takes a free one."""
    api_keys: tuple[str, ...] = ()
    """Entries of the keys that clients must send (`HASH tenant=NAME ...`)."""
    api_keys_file: Path | None = None
    """File of further entries, which the gateway follows. Without both no key is asked, which is only allowed on
    loopback."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may address the gateway on loopback without keys."""
    python: str = sys.executable
    """Interpreter that runs engines and gateway."""
    runtime_folder: Path = field(default_factory=runtime_folder)
    """Where the private state folder is made."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment that the processes start from."""
    cores: int = field(default_factory=usable_cores)
    """Cores shared by the engines that ask for no number of their own."""
    gpus: tuple[str, ...] = field(default_factory=lambda: visible_gpus(os.environ))
    """NVIDIA devices for engines that ask for one; where all are taken, the next engine shares one."""
    gateway_module: str = "pagemill_gateway"
    batches_directory: Path | None = None
    """Where the gateway keeps files and batches; `None`: it takes none."""
    gateway_workers: int = 1
    """Processes of the gateway that serve its data port."""
    stop_timeout_s: float = 5.0
    """On stop, a process gets this long after SIGTERM, then SIGKILL."""
    readyz_interval_s: float = 0.1
    """Between two questions to a process that is not ready."""
    watch_interval_s: float = 1.0
    """Between two questions to a process that is ready."""
    backoff_first_s: float = 0.5
    backoff_longest_s: float = 30.0
    """Pause before a crashed process starts again; doubles with each crash."""
    stable_after_s: float = 60.0
    """A process that was ready for this long starts with the first pause again."""
