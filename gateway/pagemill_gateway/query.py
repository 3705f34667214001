"""`python -m pagemill_gateway.query PATH`: sends a GET request to the control port of the gateway on this machine.

It is for a gateway's container, where curl is missing and the token is derived from the cluster's keys. Paths are, for
example, `/status` and `/debug/decisions?limit=3`. It reads the gateway's settings, finds the token, and writes the
response to standard output.
"""

from __future__ import annotations

import argparse
import http.client
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pagemill_gateway.config import GatewayConfig, SettingsError, load_config
from pagemill_gateway.control_token import control_tokens
from pagemill_gateway.discovery.last_known import read_last_known
from pagemill_servers.secrets.token_file import read_generated_token

CHART_SETTINGS = Path("/etc/pagemill/gateway.json")
TIMEOUT_S = 10.0
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 for status 200 and 1 for other statuses and errors; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m pagemill_gateway.query", description="Ask the gateway here.")
    parser.add_argument("path", metavar="PATH", help="such as /status or /debug/decisions?limit=3")
    parser.add_argument("--settings", type=Path, default=CHART_SETTINGS, help="the gateway's (default: the chart's)")
    arguments = parser.parse_args(argv)
    try:
        status = query(load_config(arguments.settings), arguments.path)
    except (SettingsError, OSError, ValueError, http.client.HTTPException) as error:
        sys.stderr.write(f"look: {type(error).__name__}: {error}\n")
        return 1
    return 0 if status == 200 else 1


def query(config: GatewayConfig, path: str) -> int:
    """Send the request, write the response's body to standard output, and return its status.

    Raises `SettingsError`, `OSError` and `http.client.HTTPException`.
    """
    host = ANY_ADDRESS.get(config.control_host, config.control_host)
    connection = http.client.HTTPConnection(host, config.control_port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token_of(config)}"})
        answer = connection.getresponse()
        shutil.copyfileobj(answer, sys.stdout.buffer)
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()
        return answer.status
    finally:
        connection.close()


def token_of(config: GatewayConfig) -> str:
    """Return a token that the gateway accepts; empty if it is unknown here."""
    host = ANY_ADDRESS.get(config.control_host, config.control_host)
    host = f"[{host}]" if ":" in host else host
    known = read_last_known(Path(config.kubernetes.last_known_file)) if config.discovery == "kubernetes" else None
    tokens = control_tokens(config, lambda: known.control_tokens if known is not None else ()).accepted()
    return tokens[0] if tokens else read_generated_token(f"http://{host}:{config.control_port}")


if __name__ == "__main__":
    sys.exit(main())
