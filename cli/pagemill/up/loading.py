"""Files to plans, or all errors of all files at once. Touches only the disk: nothing is started here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from pagemill.up.documents import Document, FieldPath, Finding, read_documents
from pagemill.up.messages import findings_of, show
from pagemill_crds import API_VERSION, KIND
from pagemill_crds.base import forbidden_changes
from pagemill_crds.models import LLMDeployment
from pagemill_operator.plan import Plan, Problem, make_plan
from pagemill_operator.plan.planner import name_conflicts
from pagemill_protocol.model_spec import load_model_spec
from pagemill_protocol.sources import SourceError, resolve_source


@dataclass(frozen=True)
class Loaded:
    """One good document."""

    document: Document
    deployment: LLMDeployment
    plan: Plan


@dataclass
class LoadResult:
    """What the files hold. With any finding nothing of it may be carried out."""

    loaded: list[Loaded] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def plans(self) -> list[Plan]:
        return [item.plan for item in self.loaded]


def load_files(paths: Sequence[Path], previous: Sequence[Loaded] = ()) -> LoadResult:
    """Read, validate and plan every document of every file. `previous`: what runs now, for immutable fields."""
    result = LoadResult()
    for path in dict.fromkeys(paths):
        documents, findings = read_documents(path)
        result.findings += findings
        for document in documents:
            _load_document(document, result)
    result.findings += _twice(result.loaded)
    result.findings += _conflicts(result.loaded)
    result.findings += _forbidden_changes(result.loaded, previous)
    result.findings.sort(key=lambda finding: (finding.file, finding.line or 0))
    return result


def _load_document(document: Document, result: LoadResult) -> None:
    wrong_kind = _wrong_kind(document)
    if wrong_kind:
        result.findings.append(wrong_kind)
        return
    try:
        deployment = LLMDeployment.model_validate(document.value)
    except ValidationError as error:
        findings = list(findings_of(document, error.errors(include_url=False)))
        result.findings += [*findings, *_source_findings(document, findings)]
        return
    plan = make_plan(deployment, "local")
    problems = [*plan.problems, *_model_problems(deployment, plan)]
    result.findings += [_finding(document, problem) for problem in problems]
    result.loaded.append(Loaded(document, deployment, plan))


def _wrong_kind(document: Document) -> Finding | None:
    value = document.value
    if not isinstance(value, dict):
        message = f"must be a mapping with apiVersion, kind, metadata and spec, not {show(value)}"
        return Finding(document.file, document.line, "", message)
    kind = value.get("kind")
    if isinstance(kind, str) and kind != KIND and not get_close_matches(kind.lower(), [KIND.lower()], cutoff=0.8):
        message = f"{show(kind)} is nothing that `pagemill up` runs; it runs {API_VERSION} {KIND} only"
        return Finding(document.file, document.line_of(("kind",)), "kind", message)
    return None


def _model_problems(deployment: LLMDeployment, plan: Plan) -> Iterator[Problem]:
    """What can be known of the model without loading it. Downloads are left to the engine."""
    if plan.source.startswith("hf://"):
        return
    try:
        spec = load_model_spec(resolve_source(plan.source, "spec.model.source"))
    except SourceError as error:
        yield Problem("spec.model.source", plan.source, error.message)
        return
    wanted = deployment.spec.engine.max_model_len
    if wanted is not None and wanted > spec.max_position_embeddings:
        limit = spec.max_position_embeddings
        yield Problem(
            "spec.engine.maxModelLen", wanted, f"{wanted} is more than the model's {limit}; lower it to {limit}"
        )


def _source_findings(document: Document, found: Sequence[Finding]) -> Iterator[Finding]:
    """Whether the model is there, for a document with other errors: they are all reported at once."""
    field = "spec.model.source"
    try:
        source = document.value["spec"]["model"]["source"]
    except (KeyError, TypeError):
        return
    if not isinstance(source, str) or source.startswith("hf://") or field in {finding.field for finding in found}:
        return
    try:
        resolve_source(source, field)
    except SourceError as error:
        yield _finding(document, Problem(field, source, error.message))


def _twice(loaded: list[Loaded]) -> Iterator[Finding]:
    first: dict[str, Document] = {}
    for item in loaded:
        other = first.setdefault(item.deployment.key, item.document)
        if other is not item.document:
            place = f"{other.file}:{other.line_of(('metadata', 'name'))}"
            problem = Problem(
                "metadata.name", item.plan.name, f"{item.plan.key} is defined already in {place}; rename one"
            )
            yield _finding(item.document, problem)


def _conflicts(loaded: list[Loaded]) -> Iterator[Finding]:
    conflicts = name_conflicts([item.plan for item in loaded])
    for item in loaded:
        if item.plan.key in conflicts:
            yield _finding(item.document, conflicts[item.plan.key])


def _forbidden_changes(loaded: list[Loaded], previous: Sequence[Loaded]) -> Iterator[Finding]:
    before = {item.deployment.key: item.deployment for item in previous}
    for item in loaded:
        old = before.get(item.deployment.key)
        for path, message in forbidden_changes(old.spec, item.deployment.spec, "spec") if old else ():
            yield _finding(item.document, Problem(path, None, message))


def _finding(document: Document, problem: Problem) -> Finding:
    return Finding(document.file, document.line_of(_parse_path(problem.field)), problem.field, problem.message)


def _parse_path(text: str) -> FieldPath:
    """`spec.env[0].name` -> `("spec", "env", 0, "name")`."""
    parts = text.replace("[", ".[").split(".")
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)
