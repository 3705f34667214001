"""Settings of one server process: the engine's settings and the ports, read from a JSON file.

`python -m pagemill_engine.server --settings FILE` reads it; `pagemill serve` builds it from its options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_engine.failure import StartupError
from pagemill_servers.process.settings import SettingsError, UnreadableSettingsError, read_settings


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: EngineConfig
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        if self.server.enable_lora_routes and not self.engine.enable_lora:
            raise ValueError("enable_lora_routes needs enable_lora: set it, or remove enable_lora_routes")


def load_settings(path: Path) -> Settings:
    """Read a settings file. Raises `StartupError` that names the file and the field at fault."""
    try:
        return _in_group(read_settings(path, Settings), os.environ)
    except UnreadableSettingsError as error:
        raise StartupError("SettingsUnreadable", str(error)) from error
    except SettingsError as error:
        raise StartupError("SettingsInvalid", str(error)) from error


def _in_group(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """Return the settings with the rank and the address that a pod of a group has. Raises `SettingsError`."""
    nodes = settings.engine.nodes
    if nodes is None or not nodes.of_group:
        return settings
    try:
        rank, address = int(environment["LWS_WORKER_INDEX"]), environment["LWS_LEADER_ADDRESS"]
        nodes = msgspec.structs.replace(nodes, rank=rank, address=address)
    except (KeyError, ValueError) as error:
        raise SettingsError(
            "engine.nodes.of_group needs the variables LWS_WORKER_INDEX and LWS_LEADER_ADDRESS, which the controller "
            f"of LeaderWorkerSets gives to each pod ({error}). Check its admission webhook for pods."
        ) from error
    return msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, nodes=nodes))
