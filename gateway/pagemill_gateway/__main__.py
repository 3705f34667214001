"""`python -m pagemill_gateway --settings FILE.json`: runs a gateway in one process or in several (`workers`)."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagemill_gateway.config import GatewayConfig


def main() -> int:
    """Run the gateway. Return 0 after an orderly stop, 1 if the settings are invalid or the disk is full."""
    # Process 1 of a container ignores SIGTERM without a handler, and the imports below take a while.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from pagemill_gateway.config import SettingsError, load_config
    from pagemill_servers.process.settings import full_disk_message

    parser = argparse.ArgumentParser(prog="pagemill_gateway", description="One OpenAI-compatible URL over all engines.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of GatewayConfig")
    arguments = parser.parse_args()
    try:
        return run(load_config(arguments.settings))
    except SettingsError as error:
        sys.stderr.write(f"pagemill gateway: {error}\n")
        return 1
    except OSError as error:
        message = full_disk_message(error)
        if message is None:
            raise
        sys.stderr.write(f"pagemill gateway: {message}\n")
        return 1


def run(config: GatewayConfig) -> int:
    """Serve until a signal; return the exit code. Raises `SettingsError`."""
    from pagemill_gateway import logs

    logs.configure()
    if config.workers > 1:
        from pagemill_gateway.processes.supervisor import supervise

        return asyncio.run(supervise(config))

    import uvloop

    from pagemill_gateway.processes.server import serve
    from pagemill_servers.process.malloc import return_freed_memory

    return_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
