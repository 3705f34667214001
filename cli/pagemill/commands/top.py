"""`pagemill top`: shows KV cache use, queue, tokens per second and TTFT of every engine, live.

It reads the engines of a `pagemill up` on this machine or, if none runs, those of the current kube context's cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one interval and exit (the default if the output is not a terminal).")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two readings.")] = 2.0,
    format: Annotated[
        Literal["table", "json"], typer.Option("--format", "-o", help="Output format; json implies --once.")
    ] = "table",
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Namespace to show (default: all).")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Show the cluster of this kube context instead of this machine.")
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Show the cluster of this kubeconfig file instead of this machine.")
    ] = None,
) -> None:
    """Show the load of every engine, live."""
    import asyncio
    import contextlib
    import shutil
    import sys

    from pagemill.printable import printable
    from pagemill.top.display import as_json, as_table, follow, read_interval
    from pagemill.top.sources import TopError
    from pagemill_operator.backends.local import LocalSettings

    here = LocalSettings().runtime_folder
    try:
        if once or format == "json" or not sys.stdout.isatty():
            where, rows, clients = asyncio.run(read_interval(here, context, kubeconfig, namespace, interval))
            # Not where another program reads it: names are whole there.
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            typer.echo(as_json(where, rows) if format == "json" else as_table(where, rows, width, clients))
            return
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(follow(here, context, kubeconfig, namespace, interval))
    except TopError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from None
