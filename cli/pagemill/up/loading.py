"""Turns files into plans, or reports all errors of all files at once. It only reads files and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pagemill.up.documents import Document, DocumentError, FieldPath, read_documents
from pagemill.up.messages import finding_at, findings_of, show
from pagemill_crds import ADAPTER_KIND, API_VERSION, KIND
from pagemill_crds.adapters import LoRAAdapter
from pagemill_crds.base import RULES_ERROR, forbidden_changes
from pagemill_crds.invalid import NotValid
from pagemill_crds.models import LLMDeployment
from pagemill_crds.partial import broken_rules, read_partially
from pagemill_models.sources import SourceError, find_kind, in_full, is_fetched, resolve_source
from pagemill_models.spec.model_files import load_model_spec
from pagemill_operator.plan import Plan, Problem, make_plan
from pagemill_operator.plan.adapters import AdapterClaim, ClaimedAdapters
from pagemill_operator.plan.planner import name_conflicts, partial_problems
from pagemill_operator.plan.support import Backend
from pagemill_protocol.report.adapters import WantedAdapter


@dataclass(frozen=True)
class Loaded:
    """A valid document with its deployment and plan."""

    document: Document
    deployment: LLMDeployment
    plan: Plan


@dataclass(frozen=True)
class Read:
    """A document whose invalid fields are left out, so that its conflicts with others can be reported as well."""

    document: Document
    deployment: LLMDeployment

    @property
    def key(self) -> str:
        return self.deployment.key

    @property
    def names(self) -> list[str]:
        return self.deployment.names

    @property
    def weight(self) -> int | None:
        return self.deployment.spec.routing.weight

    def claims(self) -> Iterator[Read]:
        """Yield this document, unless one of the fields that `name_conflicts` compares is invalid."""
        with suppress(NotValid):
            hash((self.key, *self.names, self.weight))
            yield self


@dataclass
class LoadResult:
    """The contents of all files. `loaded` may be used only if there are no findings."""

    loaded: list[Loaded] = field(default_factory=list)
    findings: list[DocumentError] = field(default_factory=list)
    adapters: list[tuple[Document, LoRAAdapter]] = field(default_factory=list)

    @property
    def plans(self) -> list[Plan]:
        return [item.plan for item in self.loaded]


def load_files(paths: Sequence[Path], previous: Sequence[Loaded] = (), *, backend: Backend = "local") -> LoadResult:
    """Read, validate and plan every document of every file.

    `previous` is what runs now; changes of its immutable fields are errors. Models are checked only for the local
    backend, because a cluster may read models that are not on this machine.
    """
    result = LoadResult()
    read: list[Read] = []
    for path in dict.fromkeys(paths):
        documents, findings = read_documents(path)
        result.findings += findings
        for document in documents:
            read += _load_document(document, result, backend)
    result.findings += _place_adapters(result)
    result.findings += _duplicates(read)
    result.findings += _conflicts(read)
    result.findings += _forbidden_changes(read, previous)
    result.findings.sort(key=lambda finding: (finding.file, finding.line or 0))
    return result


def _load_document(document: Document, result: LoadResult, backend: Backend) -> Iterator[Read]:
    wrong_kind = _wrong_kind(document)
    if wrong_kind:
        result.findings.append(wrong_kind)
        return
    if document.value.get("kind") == ADAPTER_KIND:
        try:
            result.adapters.append((document, LoRAAdapter.model_validate(document.value)))
        except ValidationError as error:
            result.findings += findings_of(document, error.errors(include_url=False))
        return
    try:
        deployment = LLMDeployment.model_validate(document.value)
    except ValidationError as error:
        deployment = _load_partially(document, error, result, backend)
    else:
        plan = make_plan(deployment, backend)
        result.findings += [_finding(document, problem) for problem in plan.problems]
        result.loaded.append(Loaded(document, deployment, plan))
    if backend == "local":
        result.findings += [_finding(document, problem) for problem in _model_problems(deployment)]
    yield Read(document, deployment)


def _load_partially(document: Document, error: ValidationError, result: LoadResult, backend: Backend) -> LLMDeployment:
    """Report the errors of fields, and the errors of rules and plan that do not depend on the invalid fields."""
    errors = [each for each in error.errors(include_url=False) if each["type"] != RULES_ERROR]
    deployment = read_partially(LLMDeployment, document.value, [each["loc"] for each in errors])
    result.findings += findings_of(document, errors)
    result.findings += [finding_at(document, path, message) for path, message in broken_rules(deployment)]
    result.findings += [_finding(document, problem) for problem in partial_problems(deployment, backend)]
    return deployment


def _wrong_kind(document: Document) -> DocumentError | None:
    value = document.value
    if not isinstance(value, dict):
        message = f"must be a mapping with apiVersion, kind, metadata and spec, not {show(value)}"
        return DocumentError(document.file, document.line, "", message)
    kind = value.get("kind")
    kinds = [each.lower() for each in (KIND, ADAPTER_KIND)]
    if isinstance(kind, str) and not get_close_matches(kind.lower(), kinds, cutoff=0.8):
        message = f"{show(kind)} is not supported; only {KIND} and {ADAPTER_KIND} of {API_VERSION} are"
        return DocumentError(document.file, document.line_of(("kind",)), "kind", message)
    return None


def _model_problems(deployment: LLMDeployment) -> Iterator[Problem]:
    """Yield the problems that the model's header shows. A model that must be downloaded is left to the engine."""
    with suppress(NotValid):
        source = deployment.spec.model.source
        try:
            if is_fetched(source):
                find_kind(in_full(source)).check(in_full(source), "spec.model.source")
                return
            spec = load_model_spec(resolve_source(source, "spec.model.source"))
        except SourceError as error:
            yield Problem("spec.model.source", source, error.message)
            return
        wanted, limit = deployment.spec.engine.max_model_len, spec.max_position_embeddings
        if wanted is not None and wanted > limit:
            message = f"{wanted} is more than the model's {limit}; lower it to {limit}"
            yield Problem("spec.engine.maxModelLen", wanted, message)


def _place_adapters(result: LoadResult) -> Iterator[DocumentError]:
    """Add the LoRAAdapters to the plans of their deployments; yield the conflicts. Earlier documents count as older."""
    claimed = ClaimedAdapters()
    for number, item in enumerate(result.loaded):
        key = item.plan.key
        claims = [AdapterClaim(key, each, f"{number:08}") for each in item.plan.adapters]
        claimed.name_models(key, item.plan.names)
        claimed.claim(KIND, key, claims)
    for number, (document, adapter) in enumerate(result.adapters, len(result.loaded)):
        key = f"{adapter.metadata.namespace}/{adapter.spec.deployment}"
        wanted = WantedAdapter(name=adapter.name, source=adapter.spec.source, pinned=adapter.spec.pinned)
        claim = AdapterClaim(key, wanted, f"{number:08}", adapter.metadata.name)
        claimed.claim(ADAPTER_KIND, f"{adapter.metadata.namespace}/{adapter.metadata.name}", [claim])
        plan = next((item.plan for item in result.loaded if item.plan.key == key), None)
        if plan is None:
            yield _finding(
                document, Problem("spec.deployment", key, f"no file has the {KIND} {key}; add it, or correct this")
            )
        elif not plan.serves_adapters:
            message = f"{key} has no places for adapters; set its spec.engine.lora"
            yield _finding(document, Problem("spec.deployment", key, message))
        elif refusal := claimed.refusal(claim):
            yield _finding(document, Problem("spec.name", adapter.name, refusal.message))
    for index, item in enumerate(result.loaded):
        for claim, refusal in claimed.of(item.plan.key):
            if refusal is not None and not claim.resource:
                problem = Problem("spec.model.adapters", claim.wanted.name, f"{claim.wanted.name}: {refusal.message}")
                yield _finding(item.document, problem)
        result.loaded[index] = replace(item, plan=replace(item.plan, adapters=claimed.wanted(item.plan.key)))


def _duplicates(read: list[Read]) -> Iterator[DocumentError]:
    first: dict[str, Document] = {}
    for item in read:
        with suppress(NotValid):
            other = first.setdefault(item.key, item.document)
            if other is not item.document:
                place = f"{other.file}:{other.line_of(('metadata', 'name'))}"
                message = f"{item.key} is already defined in {place}; rename one"
                yield _finding(item.document, Problem("metadata.name", item.key, message))


def _conflicts(read: list[Read]) -> Iterator[DocumentError]:
    claims = [claim for item in read for claim in item.claims()]
    conflicts = name_conflicts(claims)
    for item in claims:
        if item.key in conflicts:
            yield _finding(item.document, conflicts[item.key])


def _forbidden_changes(read: list[Read], previous: Sequence[Loaded]) -> Iterator[DocumentError]:
    before = {item.deployment.key: item.deployment for item in previous}
    for item in read:
        with suppress(NotValid):
            old = before.get(item.key)
            for path, message in forbidden_changes(old.spec, item.deployment.spec, "spec") if old else ():
                yield _finding(item.document, Problem(path, None, message))


def _finding(document: Document, problem: Problem) -> DocumentError:
    return DocumentError(document.file, document.line_of(_parse_path(problem.field)), problem.field, problem.message)


def _parse_path(text: str) -> FieldPath:
    """Return the path of a text: `spec.env[0].name` becomes `("spec", "env", 0, "name")`."""
    parts = text.replace("[", ".[").split(".")
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def describe_changes(before: Sequence[Loaded], after: Sequence[Loaded]) -> list[str]:
    """Return one line for each deployment that was added or removed, and for each field that differs."""
    old = {item.deployment.key: item for item in before}
    new = {item.deployment.key: item for item in after}
    lines = [f"{item.plan.name}: removed" for key, item in old.items() if key not in new]
    lines += [f"{item.plan.name}: added" for key, item in new.items() if key not in old]
    for key in old.keys() & new.keys():
        changed = [*_changed_fields(old[key], new[key])]
        if not changed and old[key].plan.adapters != new[key].plan.adapters:
            names = [", ".join(each.name for each in item[key].plan.adapters) or "none" for item in (old, new)]
            changed = [f"{new[key].plan.name}: adapters: {names[0]} -> {names[1]}"]
        lines += changed
    return lines


def _changed_fields(old: Loaded, new: Loaded) -> Iterator[str]:
    before, after = _flat(old.deployment.spec.model_dump()), _flat(new.deployment.spec.model_dump())
    rolling = old.plan.groups[0].digest != new.plan.groups[0].digest
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        if was != now:
            effect = " (replaces replicas)" if rolling else ""
            yield f"{new.plan.name}: spec{path}: {_show(was)} -> {_show(now)}{effect}"


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for name, child in value.items() for key, leaf in _flat(child, f"{path}.{name}").items()}
    if isinstance(value, list) and value:
        return {key: leaf for i, child in enumerate(value) for key, leaf in _flat(child, f"{path}[{i}]").items()}
    return {path: None if value in ([], {}) else value}


def _show(value: Any) -> str:
    return "unset" if value is None else show(value)
