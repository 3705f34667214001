"""Run one operator process: `python -m pagemill_operator --settings FILE.json --identity NAME [--kubeconfig FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from pagemill_kube.credentials import Credentials, in_cluster
from pagemill_kube.errors import CredentialsError
from pagemill_operator.config import OperatorConfig, load_config
from pagemill_operator.controller.operator import Operator
from pagemill_servers.process import logs
from pagemill_servers.process.settings import SettingsError


def main() -> int:
    """Run the operator; return 0 after an orderly stop, 1 for invalid settings. Losing the leadership exits with code
    2.
    """
    parser = argparse.ArgumentParser(prog="pagemill_operator", description="Carries out LLMDeployments in a cluster.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of OperatorConfig")
    parser.add_argument("--identity", required=True, help="name of this replica in the Lease, such as the pod's name")
    parser.add_argument("--kubeconfig", type=Path, help="outside of a cluster: how to reach it")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.settings)
        configure_logs(config.log_level)
        asyncio.run(run(config, arguments.identity, arguments.kubeconfig))
    except SettingsError as error:
        sys.stderr.write(f"pagemill operator: {error}\n")
        return 1
    return 0


def configure_logs(level: str) -> None:
    logs.configure(level)
    # kopf logs an error for each failed attempt of each request; metrics and the ages of the watches report that
    # better.
    logging.getLogger("kopf").setLevel(logging.CRITICAL if level != "DEBUG" else logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


async def run(config: OperatorConfig, identity: str, kubeconfig: Path | None) -> None:
    """Run the operator until a signal stops it. Raise `SettingsError` if there are no credentials."""
    await Operator(config, await load_credentials(kubeconfig), identity).run()


async def load_credentials(kubeconfig: Path | None) -> Credentials:
    """Return the credentials of the kubeconfig, or of the pod's service account without one."""
    try:
        if kubeconfig is None:
            return in_cluster()
        from pagemill_kube.login import log_in

        return (await log_in(kubeconfig)).credentials
    except CredentialsError as error:
        where = "this pod's service account" if kubeconfig is None else str(kubeconfig)
        raise SettingsError(f"no credentials for the cluster in {where}: {error}; give --kubeconfig FILE") from None


if __name__ == "__main__":
    sys.exit(main())
