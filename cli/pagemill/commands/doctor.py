"""`pagemill doctor`: checks what serving needs, and shows each finding with its remedy.

It checks this machine and the `pagemill up` that runs on it, or the cluster of a kube context.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from pagemill.doctor.findings import CheckResult


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the cluster of the current kube context instead of this machine.")
    ] = False,
    context: Annotated[str | None, typer.Option(help="Kube context of the cluster to check.")] = None,
    kubeconfig: Annotated[Path | None, typer.Option(help="Kubeconfig file of the cluster to check.")] = None,
    format: Annotated[Literal["table", "json"], typer.Option("--format", "-o", help="Output format.")] = "table",
) -> None:
    """Check what serving needs. Exit code 1: a check found an error; 2: there was no cluster to check."""
    import asyncio

    from pagemill.cluster import ClusterError
    from pagemill.doctor.findings import as_json, as_table
    from pagemill.doctor.machine import look_at_machine
    from pagemill.printable import printable
    from pagemill_operator.backends.local import LocalSettings

    try:
        if cluster or context is not None or kubeconfig is not None:
            where, findings = asyncio.run(_look_at_cluster(context, kubeconfig))
        else:
            where, findings = "this machine", asyncio.run(look_at_machine(LocalSettings()))
    except ClusterError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from None
    typer.echo(as_json(where, findings) if format == "json" else as_table(where, findings))
    raise typer.Exit(1 if any(each.level == "error" for each in findings) else 0)


async def _look_at_cluster(context: str | None, kubeconfig: Path | None) -> tuple[str, list[CheckResult]]:
    from pagemill.cluster import HELP, ClusterError, connect
    from pagemill.doctor.cluster import look_at_cluster
    from pagemill_kube.errors import Unreachable

    client, chosen, _ = await connect(context, kubeconfig)
    try:
        return f"context {chosen}", await look_at_cluster(client, chosen)
    except Unreachable as error:
        raise ClusterError(f"the API server of context {chosen} cannot be reached: {error}; {HELP}") from None
    finally:
        await client.close()
