"""`python -m pagemill_gateway.processes`: runs the control process or a worker, according to the supervisor's setup."""

from __future__ import annotations

import asyncio
import sys

from pagemill_gateway.processes.child import Setup, end_at_once_when_asked, read_setup, send_heartbeats


def main() -> int:
    """Run the process. Return 0 after an orderly stop, and 1 for invalid settings."""
    end_at_once_when_asked()
    setup = read_setup()
    from pagemill_gateway.config import SettingsError

    try:
        _run(setup)
    except SettingsError as error:
        sys.stderr.write(f"pagemill gateway: {error}\n")
        return 1
    return 0


def _run(setup: Setup) -> None:
    import uvloop

    from pagemill_gateway import logs
    from pagemill_gateway.processes.serving import serve_control, serve_data
    from pagemill_servers.process.malloc import return_freed_memory

    return_freed_memory()
    logs.configure(process=setup.name)
    serve = serve_control if setup.role == "control" else serve_data

    async def run() -> None:
        beating = asyncio.create_task(send_heartbeats())
        try:
            await serve(setup)
        finally:
            beating.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    sys.exit(main())
