"""Options that `pagemill plan` and `pagemill simulate` share: targets, and the source of a replica's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Ttft = Annotated[str | None, typer.Option(help="Time to first token to keep, such as 500ms (default: the file's SLO).")]
Tpot = Annotated[
    str | None, typer.Option(help="Time per output token to keep, such as 50ms (default: the file's SLO).")
]
Accelerator = Annotated[
    str | None, typer.Option(help="Reckon with an accelerator's data sheet: a100-80gb, h100-80gb, h200, l4, l40s.")
]
Fit = Annotated[
    Path | None, typer.Option(help="Step times to use: `pagemill why NAME -o json`, or an earlier plan's JSON.")
]
Model = Annotated[Path | None, typer.Option(help="Folder or .gguf file to read in place of model.source.")]
MeasureS = Annotated[
    float, typer.Option("--measure-s", min=1, max=600, help="Seconds of measuring, where this machine is measured.")
]
Format = Annotated[Literal["table", "json"], typer.Option("--format", "-o", help="For people, or whole.")]
