"""Step times from a file: learned by a running deployment, or measured by an earlier plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from pagemill.planning.errors import PlanError
from pagemill_protocol.state import StepTimeParams
from pagemill_protocol.step_time import StepTimeModel

FORMS = (
    "give what `pagemill why NAME -o json` or `pagemill plan -o json` printed, or an object with knots_tokens and "
    "knot_ms"
)


def read_fit(path: Path) -> StepTimeParams:
    """The step times in the file. Raises `PlanError`."""
    try:
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError(f"--fit {path}: cannot be read: {error.strerror}; {FORMS}") from None
    except ValueError:
        raise PlanError(f"--fit {path}: is no JSON; {FORMS}") from None
    try:
        fit = msgspec.convert(_step_time(body), StepTimeParams)
        known = StepTimeModel.from_params(fit).known
    except (msgspec.ValidationError, ValueError) as error:
        raise PlanError(f"--fit {path}: {error}; {FORMS}") from None
    if not known:
        raise PlanError(f"--fit {path}: holds no step times; {FORMS}")
    return fit


def _step_time(body: Any) -> Any:
    """The step times, wherever the file has them; the latest of several records."""
    if not isinstance(body, dict):
        return body
    if "stepTime" in body:
        return body["stepTime"]
    for record in reversed(body.get("records") or []):
        reported = record.get("signals", {}).get("engines", {}).get("step_time") or {}
        remembered = ((record.get("memory") or {}).get("shape") or {}).get("step_time") or {}
        if reported.get("knots_tokens") or remembered.get("knots_tokens"):
            return reported if reported.get("knots_tokens") else remembered
    return body
