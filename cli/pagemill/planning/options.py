"""The options that `pagemill plan` and `pagemill simulate` share: the SLO, and the sources of a replica's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Ttft = Annotated[str | None, typer.Option(help="Maximum time to first token, such as 500ms (default: the file's SLO).")]
Tpot = Annotated[
    str | None, typer.Option(help="Maximum time per output token, such as 50ms (default: the file's SLO).")
]
Accelerators = Annotated[
    list[str] | None,
    typer.Option(
        "--accelerator",
        help="Accelerator whose step times are computed from its data sheet instead of measured here: a100-40gb, "
        "a100-80gb, b200, h100-80gb, h200, l4, l40s or mi300x. May be repeated to compare several.",
    ),
]
PricesPerHour = Annotated[
    list[str] | None,
    typer.Option(
        "--price-per-hour",
        help="Price of one replica per hour, such as 2.5, or of one on a certain accelerator, such as l4=0.8. May be "
        "repeated (default: by the file's cost).",
    ),
]
Fit = Annotated[
    Path | None,
    typer.Option(
        help="File with step times to use: the output of `pagemill why NAME -o json` or `pagemill plan -o json`."
    ),
]
File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="YAML file with the LLMDeployment (default: one with --model and defaults)."),
]
TokensPerDecode = Annotated[
    str | None,
    typer.Option(
        "--tokens-per-decode",
        help="Tokens that a decode samples in a step, where proposed tokens are right, and computes, such as 2.4/4 "
        "(default: those of --fit, or 1/1).",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model to use instead of the file's model.source: hf://ORG/NAME, a folder or a .gguf file. With "
        "--accelerator or --fit only its header is read."
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Model to use instead of the file's model.source: hf://ORG/NAME, a folder or a .gguf file. May be "
        "repeated to compare several. With --accelerator or --fit only its header is read.",
    ),
]
MeasureS = Annotated[
    float,
    typer.Option(
        "--measure-s",
        min=1,
        max=600,
        help="Seconds to measure step times on this machine; not used with --accelerator or --fit.",
    ),
]
Format = Annotated[
    Literal["table", "json"], typer.Option("--format", "-o", help="Output format; json has all details.")
]
