"""Options that `pagemill plan` and `pagemill simulate` share: targets, and the source of a replica's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Ttft = Annotated[str | None, typer.Option(help="Time to first token to keep, such as 500ms (default: the file's SLO).")]
Tpot = Annotated[
    str | None, typer.Option(help="Time per output token to keep, such as 50ms (default: the file's SLO).")
]
Accelerators = Annotated[
    list[str] | None,
    typer.Option(
        "--accelerator",
        help="Reckon with an accelerator's data sheet: a100-40gb, a100-80gb, b200, h100-80gb, h200, l4, l40s or "
        "mi300x; again to compare several.",
    ),
]
PricesPerHour = Annotated[
    list[str] | None,
    typer.Option(
        "--price-per-hour",
        help="Price of one replica for one hour, such as 2.5, or on one accelerator, such as l4=0.8; again for "
        "several (default: cost.gpuHour for each GPU).",
    ),
]
Fit = Annotated[
    Path | None, typer.Option(help="Step times to use: `pagemill why NAME -o json`, or an earlier plan's JSON.")
]
File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="YAML file with the LLMDeployment; without it, one of --model is taken."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model to read in place of model.source: hf://ORG/NAME, a folder or a .gguf file. With --accelerator or "
        "--fit only its header is read."
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Model to read in place of model.source: hf://ORG/NAME, a folder or a .gguf file; again to compare "
        "several. With --accelerator or --fit only its header is read.",
    ),
]
MeasureS = Annotated[
    float, typer.Option("--measure-s", min=1, max=600, help="Seconds of measuring, where this machine is measured.")
]
Format = Annotated[Literal["table", "json"], typer.Option("--format", "-o", help="For people, or whole.")]
