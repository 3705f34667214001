"""`pagemill explain`: describes a field of LLMDeployment from the schema that the API server and `pagemill up` use."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    path: Annotated[
        str, typer.Argument(help="Dotted path of a field, such as llmdeployment.spec.engine.maxModelLen.")
    ] = "",
) -> None:
    """Describe the fields of LLMDeployment."""
    from pagemill_crds.explain import UnknownField, describe, find

    try:
        field = find(path)
    except UnknownField as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(describe(field))
