"""`pagemill why NAME`: shows the last scaling decisions of an LLMDeployment with their inputs.

It reads the records of a `pagemill up` on this machine or, if none has decided about the deployment, those of the
current kube context's cluster. A record contains all inputs of its decision, so the decision can be replayed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from pagemill.why.sources import FoundRecords


def why(
    name: Annotated[str, typer.Argument(help="Name of the LLMDeployment.")],
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", help="Namespace of the LLMDeployment (default: the kube context's, or the only one)."
        ),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=1000, help="Number of decisions to show.")] = 10,
    format: Annotated[
        Literal["table", "json"], typer.Option("--format", "-o", help="Output format; json has the complete records.")
    ] = "table",
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Repeat each decision from its recorded inputs; exit with 1 if a result differs."
        ),
    ] = False,
    context: Annotated[
        str | None, typer.Option(help="Read from the cluster of this kube context instead of this machine.")
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Read from the cluster of this kubeconfig file instead of this machine.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Read the records from this file: lines of /debug/scaling, or earlier output of -o json."),
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


def _find(
    name: str, namespace: str | None, context: str | None, kubeconfig: Path | None, file: Path | None
) -> FoundRecords:
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
        for option, value in (("--context", context), ("--kubeconfig", kubeconfig)):
            if value is not None:
                raise WhyError(f"{option} {value}: with --file no cluster is read; remove one of them")
        return from_file(file, name, namespace)
    here = LocalSettings().runtime_folder
    if context is None and kubeconfig is None and (found := from_this_machine(here, name, namespace)):
        return found
    if context is None and kubeconfig is None and (pid := served_on_this_machine(here, name, namespace)):
        raise WhyError(
            f"`pagemill up` (process {pid}) serves {name} but has made no scaling decision: the number of replicas is "
            "fixed, or there was no load yet; set spec.autoscaling to scale with the load"
        )

    from pagemill.why.cluster import from_cluster

    served = names_on_this_machine(here) if context is None and kubeconfig is None else []
    try:
        return asyncio.run(from_cluster(name, namespace, context, kubeconfig))
    except WhyError as error:
        if not served:
            raise
        raise WhyError(
            f"`pagemill up` on this machine serves no {name}; it serves {', '.join(served)}. Nor is it found in a "
            f"cluster: {error}"
        ) from None
