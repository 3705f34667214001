"""`pagemill why NAME`: the last scaling decisions of an LLMDeployment with their inputs.

On this machine it asks a running `pagemill up`, otherwise the cluster of the current kube context. Every record holds
the whole input of its decision, so the decision can be replayed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from pagemill.why.sources import Found


def why(
    name: Annotated[str, typer.Argument(help="Name of the LLMDeployment.")],
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Its namespace (default: the context's, or the only one).")
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=1000, help="Decisions to show.")] = 10,
    format: Annotated[
        Literal["table", "json"], typer.Option("--format", "-o", help="For people, or whole records.")
    ] = "table",
    replay: Annotated[
        bool, typer.Option("--replay", help="Decide each again; exit code 1 where the result differs.")
    ] = False,
    context: Annotated[str | None, typer.Option(help="Kube context to ask, in place of this machine.")] = None,
    kubeconfig: Annotated[Path | None, typer.Option(help="Kubeconfig to use, in place of this machine.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read records from this file: lines of /debug/scaling, or an earlier -o json.")
    ] = None,
) -> None:
    """Show the last scaling decisions of a deployment."""
    from pagemill.printable import printable
    from pagemill.why.replaying import decide_again
    from pagemill.why.sources import WhyError
    from pagemill.why.table import as_json, as_table

    try:
        found = _find(name, namespace, context, kubeconfig, file)
    except WhyError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from None
    records = found.records[-last:]
    replays = [decide_again(record) for record in records] if replay else None
    typer.echo(as_json(found.where, records, replays) if format == "json" else as_table(found.where, records, replays))
    if replays and not all(each.is_same for each in replays):
        raise typer.Exit(1)


def _find(name: str, namespace: str | None, context: str | None, kubeconfig: Path | None, file: Path | None) -> Found:
    import asyncio

    from pagemill.why.sources import (
        WhyError,
        from_file,
        from_this_machine,
        names_on_this_machine,
        served_on_this_machine,
    )
    from pagemill_operator.backends.local import LocalSettings

    if file is not None:
        return from_file(file, name, namespace)
    here = LocalSettings().runtime_folder
    if context is None and kubeconfig is None and (found := from_this_machine(here, name, namespace)):
        return found
    if context is None and kubeconfig is None and (pid := served_on_this_machine(here, name, namespace)):
        raise WhyError(
            f"`pagemill up` (process {pid}) serves {name} and has decided nothing about its replicas: their number is "
            "fixed, or no load was seen yet; spec.autoscaling lets the load decide"
        )

    from pagemill.why.cluster import from_cluster

    try:
        return asyncio.run(from_cluster(name, namespace, context, kubeconfig))
    except WhyError as error:
        if context is not None or kubeconfig is not None:
            raise
        names = ", ".join(names_on_this_machine(here)) or "nothing"
        raise WhyError(f"{error}; `pagemill up` on this machine has decided about {names}") from None
