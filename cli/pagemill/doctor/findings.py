"""The findings of checks and their output as a table and as JSON. A check that cannot be done is a finding, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pagemill.columns import columns
from pagemill.printable import printable

Level = Literal["ok", "note", "error"]
"""note: something optional is missing, or a check was not possible."""


class CheckResult(NamedTuple):
    level: Level
    subject: str
    message: str
    remedy: str = ""
    """The action to take; empty only for level `ok`."""


def ok(subject: str, message: str) -> CheckResult:
    return CheckResult("ok", subject, message)


def as_json(where: str, findings: Sequence[CheckResult]) -> str:
    return json.dumps({"lookedAt": where, "findings": [each._asdict() for each in findings]}, indent=1)


def as_table(where: str, findings: Sequence[CheckResult]) -> str:
    lines = [where, ""]
    for finding, line in zip(findings, columns([[*each[:3]] for each in findings]), strict=True):
        lines.append(line)
        lines += [f"       -> {finding.remedy}"] if finding.remedy else []
    count = sum(each.level == "error" for each in findings)
    lines += ["", "1 error" if count == 1 else f"{count} errors"]
    return printable("\n".join(lines))
