"""Chooses what `plan` and `simulate` compute: a deployment, its SLO and its accelerator. Options override the file."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import typer
from pydantic import ValidationError

from pagemill.planning.accelerators import NAMES, Accelerator, find_accelerator
from pagemill.planning.errors import PlanError
from pagemill.up.documents import Document
from pagemill.up.loading import Loaded, load_files
from pagemill.up.screen import report_errors
from pagemill_crds import API_VERSION, KIND
from pagemill_crds.models import LLMDeployment
from pagemill_models.sources import default_name, in_full, is_fetched
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.plan import make_plan
from pagemill_protocol.resource.quantities import duration_seconds

NO_FILE = "--model"
"""The file name in the document of a deployment that no file describes."""
_NO_LABEL = re.compile(r"[^a-z0-9-]+")


class Subject(NamedTuple):
    """A deployment on a device."""

    loaded: Loaded
    accelerator: Accelerator | None
    """`None`: this machine, or the device on which the step times of `--fit` were measured."""
    model: str | None
    """A source to read instead of the deployment's."""

    @property
    def label(self) -> str:
        """The model's name in the output."""
        return self.model or self.loaded.plan.key

    @property
    def is_of_file(self) -> bool:
        return self.loaded.document.file != NO_FILE

    @property
    def device(self) -> str:
        return "this machine" if self.accelerator is None else self.accelerator.name


def subjects_of(
    deployments: Sequence[tuple[str | None, Loaded]], accelerators: Sequence[str], fit: Path | None
) -> list[Subject]:
    """Return every combination of deployment and accelerator. Raises `PlanError`."""
    names: list[str | None] = [*accelerators]
    found = [
        Subject(loaded, accelerator, model)
        for model, loaded in deployments
        for accelerator in dict.fromkeys(accelerator_of(loaded, name) for name in names or [None])
    ]
    if fit is not None and len(found) > 1:
        raise PlanError(f"--fit {fit}: has the step times of one model on one device; plan one combination at a time")
    return found


def load_one(file: Path | None, name: str | None, model: str | None = None) -> Loaded:
    """Return the deployment of the file; without a file, one with the model and defaults.

    Raises `PlanError`. Reports the errors of the file and exits with 2.
    """
    if file is None:
        if name is not None:
            raise PlanError(f"--name {name}: chooses among the LLMDeployments of a file; add --file, or remove it")
        return _of_model(model)
    result = load_files([file], backend="kubernetes")
    if result.findings:
        report_errors(str(finding) for finding in result.findings)
        raise typer.Exit(2)
    names = [item.plan.name for item in result.loaded]
    chosen = [item for item in result.loaded if name in (None, item.plan.name)]
    if not chosen:
        raise PlanError(f"--name {name}: {file} has no such LLMDeployment; it has {', '.join(names)}")
    if len(chosen) > 1:
        raise PlanError(f"{file}: has several LLMDeployments; choose one with --name: {', '.join(names)}")
    return chosen[0]


def _of_model(model: str | None) -> Loaded:
    if model is None:
        raise PlanError("give --file with an LLMDeployment, or --model with a model's source such as hf://ORG/NAME")
    source = in_full(model) if is_fetched(model) or "://" in model else Path(model).expanduser().resolve().as_uri()
    name = _NO_LABEL.sub("-", default_name(model).lower()).strip("-")[:50].strip("-")
    if not name[:1].isalpha():
        name = f"model-{name}".rstrip("-")
    value = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"model": {"source": source}},
    }
    try:
        deployment = LLMDeployment.model_validate(value)
    except ValidationError as error:
        raise PlanError(f"--model {model}: {error.errors()[0]['msg']}") from None
    return Loaded(Document(NO_FILE, 1, value), deployment, make_plan(deployment, "kubernetes"))


def slo_of(given: Slo | None, ttft: str | None, tpot: str | None, percentile: int | None) -> Slo:
    """Return the SLO of the file, overridden by the options; without both it has no limits. Raises `PlanError`."""
    known = given or Slo()
    return Slo(
        ttft_ms=milliseconds("--ttft", ttft) if ttft is not None else known.ttft_ms,
        tpot_ms=milliseconds("--tpot", tpot) if tpot is not None else known.tpot_ms,
        share=known.share if percentile is None else percentile / 100,
    )


def milliseconds(option: str, duration: str) -> float:
    """Return a duration in milliseconds. Raises `PlanError` unless it is above 0."""
    value = seconds(option, duration) * 1000
    if value <= 0:
        raise PlanError(f"{option} {duration}: must be above 0; write it like 300ms")
    return value


def seconds(option: str, duration: str) -> float:
    """Return a duration in seconds. Raises `PlanError`."""
    try:
        return duration_seconds(duration)
    except ValueError as error:
        raise PlanError(f"{option} {error}") from None


def accelerator_of(loaded: Loaded, name: str | None) -> Accelerator | None:
    """Return the accelerator with this name, or that of the file's pods; `None` for a CPU. Raises `PlanError`."""
    resources = loaded.deployment.spec.resources
    wanted = name or (resources.gpu_product if resources.gpus else None)
    if wanted is None and resources.gpus:
        raise PlanError(f"spec.resources.gpus {resources.gpus}: name the accelerator with --accelerator: {NAMES}")
    if wanted is None:
        return None
    accelerator = find_accelerator(wanted)
    if accelerator is None:
        field = f"--accelerator {name}" if name else f"spec.resources.gpuProduct {wanted}"
        raise PlanError(f"{field}: is unknown; name one with --accelerator: {NAMES}")
    return accelerator


def show_progress(words: str) -> None:
    """Write a line of progress to stderr, if it is a terminal."""
    if sys.stderr.isatty():
        typer.echo(words, err=True)
