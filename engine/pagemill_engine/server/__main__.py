"""`python -m pagemill_engine.server --settings FILE`: runs the two processes of one engine.

It writes events (ports, phases, readiness) to stdout as JSON lines, and the termination message as the last line to
stderr.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill_engine.ipc.messages import Ready
    from pagemill_engine.server.main import ServerEvents


def main(argv: list[str] | None = None) -> int:
    """Run the server and return the exit code.

    0: ended by a signal. 1: failed, with a termination message on stderr. 2: wrong command line.
    """
    # A container's first process ignores SIGTERM unless it sets a handler, and imports take a while.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from pagemill_engine.failure import KUBERNETES_LOG, StartupError, disk_full, write_termination
    from pagemill_engine.ipc.process import EngineProcess
    from pagemill_engine.server.settings import load_settings
    from pagemill_servers.process import logs

    parser = argparse.ArgumentParser(prog="python -m pagemill_engine.server", description="Serve one model.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file with `engine` and `server`.")
    arguments = parser.parse_args(argv)
    logs.configure(logging.WARNING, process="server")
    termination_log = str(KUBERNETES_LOG) if KUBERNETES_LOG.exists() else None
    try:
        settings = load_settings(arguments.settings)
        termination_log = settings.server.termination_log or termination_log
        if settings.engine.nodes is not None and settings.engine.nodes.rank > 0:
            from pagemill_engine.server.node import compute_only

            compute_only(settings.engine)
            return 0
        with EngineProcess.launch(settings.engine) as process:
            from pagemill_engine.server.main import run_server

            run_server(settings, process, _events())
    except StartupError as error:
        sys.stderr.write(write_termination(error.termination, termination_log) + "\n")
        return 1
    except Exception as error:
        failure = disk_full(error) or StartupError("ServerFailed", f"{type(error).__name__}: {error}")
        if failure.termination.reason == "ServerFailed":
            # The termination message carries no traceback.
            logging.getLogger(__name__).exception("the server ends because of an internal error")
        sys.stderr.write(write_termination(failure.termination, termination_log) + "\n")
        return 1
    return 0


def _events() -> ServerEvents:
    from pagemill_engine.server.main import ServerEvents

    return ServerEvents(
        on_listening=lambda port, control_port: _say(event="listening", port=port, control_port=control_port),
        on_token=lambda path: _say(event="control_token", file=path),
        on_phase=lambda phase, detail: _say(event="phase", phase=phase, detail=detail),
        on_ready=_say_ready,
        on_drain=lambda num_requests: _say(event="draining", num_requests=num_requests),
    )


def _say_ready(ready: Ready) -> None:
    _say(
        event="ready",
        num_blocks=ready.limits.num_blocks,
        max_model_len=ready.limits.max_model_len,
        load_s=round(ready.load_s, 3),
    )


def _say(**fields: Any) -> None:
    """Write one event line to stdout. A closed pipe is ignored, because serving can continue."""
    import orjson

    try:
        sys.stdout.write(orjson.dumps(fields).decode() + "\n")
        sys.stdout.flush()
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
