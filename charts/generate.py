"""Generates the chart's derived files from their sources: `python charts/generate.py [--check]`.

`values.yaml` with its comments is the source of `values.schema.json`, of the table in the chart's README and of
`docs/reference/chart.md`; `crds/llmdeployments.yaml` is the source of the template that installs it; `observability`
makes the rules and dashboards in `files/`, and those that `pagemill up --dashboards` is packaged with. With `--check`
nothing is written and the exit code is 1 if a file differs from its source.

In `values.yaml` the comment above a key is its documentation. A last line `# @schema {...}` holds JSON schema keywords
that the default does not imply; `$type` in it names one of `TYPES`. A key with `$type` is a leaf: Kubernetes, not the
chart, defines its content. `## @section NAME` starts a section of the tables.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from observability.alerts import ALERTS
from observability.dashboards import all_pages
from observability.panels import dashboard_json
from observability.rules import rules_file

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "pagemill"
DEFINITIONS = ("llmdeployments.yaml", "loraadapters.yaml")
"""Files in `crds`, each of which becomes a template."""
RUNBOOKS = ROOT / "gateway" / "pagemill_gateway" / "runbooks"
"""What gateways serve at `/runbooks`."""
CLI_FILES = ROOT / "cli" / "pagemill" / "up" / "files"
MARK = "@schema"
SECTION = "## @section "
README_BEGIN, README_END = "<!-- values: begin -->", "<!-- values: end -->"
NOTE = "Generated from charts/pagemill/values.yaml by `python charts/generate.py`; do not edit."

TEXT: dict[str, Any] = {"type": "string"}
OWN_LABELS = [f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "managed-by")]
"""The labels by which selectors and Helm find objects."""
TYPES: dict[str, dict[str, Any]] = {
    "labels": {"type": "object", "additionalProperties": TEXT},
    "moreLabels": {"type": "object", "additionalProperties": TEXT, "properties": dict.fromkeys(OWN_LABELS, False)},
    "strings": {"type": "array", "items": TEXT},
    "object": {"type": "object"},
    "objects": {"type": "array", "items": {"type": "object"}},
    "named": {
        "type": "array",
        "items": {"type": "object", "required": ["name"], "properties": {"name": {**TEXT, "minLength": 1}}},
    },
    "references": {
        "type": "array",
        "items": {"type": "object", "required": ["name"], "properties": {"name": {**TEXT, "minLength": 1}}},
    },
    "tag": {**TEXT, "pattern": r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?$", "not": {"const": "latest"}},
    "digest": {**TEXT, "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "pullPolicy": {**TEXT, "enum": ["Always", "IfNotPresent", "Never"]},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "intOrPercent": {"type": ["integer", "string"], "pattern": "^[0-9]{1,3}%$", "minimum": 0},
    "duration": {**TEXT, "pattern": "^[0-9]+(ms|s|m|h)$"},
}
SHOWN_TYPES = {
    "labels": "map of text",
    "moreLabels": "map of text",
    "strings": "list of text",
    "objects": "list of objects",
    "named": "list of objects",
    "references": "list of objects",
    "intOrPercent": "integer or percent",
    "tag": "text",
    "digest": "text",
    "duration": "duration",
    "port": "port",
}


class ValuesError(ValueError):
    """A mistake in `values.yaml`; the message names the line."""


class Comment(NamedTuple):
    """The comment above a key."""

    meaning: str
    keywords: dict[str, Any]
    section: str


class Row(NamedTuple):
    """One row of the table."""

    section: str
    path: str
    type: str
    default: str
    meaning: str


def read_comment(lines: list[str], key_line: int) -> Comment:
    """Return the comment that ends directly above line `key_line` (from 0), and its section."""
    first = key_line
    while first > 0 and lines[first - 1].strip().startswith("# "):
        first -= 1
    words = [line.strip()[2:] for line in lines[first:key_line]]
    keywords: dict[str, Any] = {}
    if words and words[-1].startswith(MARK):
        keywords = yaml.safe_load(words.pop()[len(MARK) :])
    sections = [line[len(SECTION) :].strip() for line in lines[:key_line] if line.startswith(SECTION)]
    return Comment(" ".join(words), keywords, sections[-1] if sections else "")


def schema_of(node: yaml.Node, lines: list[str]) -> dict[str, Any]:
    """Return the JSON schema of a mapping of `values.yaml`, which allows only its keys."""
    properties: dict[str, Any] = {}
    for key, value in _entries(node):
        comment = read_comment(lines, key.start_mark.line)
        properties[key.value] = _property(key, value, comment, lines)
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(key: yaml.Node, value: yaml.Node, comment: Comment, lines: list[str]) -> dict[str, Any]:
    keywords = dict(comment.keywords)
    named = keywords.pop("$type", None)
    described = {"description": comment.meaning} if comment.meaning else {}
    if named is not None:
        if named not in TYPES:
            raise ValuesError(f"line {key.start_mark.line}: there is no $type {named!r}; use one of {sorted(TYPES)}.")
        inferred = TYPES[named]
    elif isinstance(value, yaml.MappingNode) and value.value:
        inferred = schema_of(value, lines)
    elif isinstance(value, yaml.ScalarNode):
        inferred = {"type": _scalar_type(value)}
    elif "type" in keywords:
        inferred = {}
    else:
        raise ValuesError(f"line {key.start_mark.line + 1}: {key.value} is empty; say what may stand in it by {MARK}.")
    return {**described, **inferred, **keywords, **({} if is_branch(value, comment) else {"default": plain(value)})}


def is_branch(value: yaml.Node, comment: Comment) -> bool:
    """Whether the chart defines every key of the value."""
    return isinstance(value, yaml.MappingNode) and bool(value.value) and "$type" not in comment.keywords


def plain(node: yaml.Node) -> Any:
    """Return the value of a node."""
    return yaml.SafeLoader("").construct_object(node, deep=True)


def _scalar_type(node: yaml.Node) -> str:
    value = plain(node)
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    raise ValuesError(f"line {node.start_mark.line + 1}: {value!r} has no type; use an empty text, list or map.")


def _entries(node: yaml.Node) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    assert isinstance(node, yaml.MappingNode)
    entries: list[tuple[yaml.ScalarNode, yaml.Node]] = node.value
    return entries


def rows_of(node: yaml.Node, lines: list[str], prefix: str = "") -> Iterator[Row]:
    """Yield every leaf of `values.yaml`. Raise `ValuesError` for a leaf without documentation."""
    for key, value in _entries(node):
        comment = read_comment(lines, key.start_mark.line)
        path = f"{prefix}{key.value}"
        if is_branch(value, comment):
            yield from rows_of(value, lines, f"{path}.")
            continue
        if not comment.meaning:
            raise ValuesError(f"line {key.start_mark.line + 1}: {path} has no documentation; write it above the key.")
        shown = json.dumps(plain(value), ensure_ascii=False)
        yield Row(comment.section, path, _shown_type(value, comment), shown, comment.meaning)


def _shown_type(value: yaml.Node, comment: Comment) -> str:
    keywords = {**TYPES.get(comment.keywords.get("$type", ""), {}), **comment.keywords}
    if "enum" in keywords:
        return ", ".join(f"`{each}`" if each else "empty" for each in keywords["enum"])
    named = comment.keywords.get("$type", "")
    if named:
        return SHOWN_TYPES.get(str(named), str(named))
    if not isinstance(value, yaml.ScalarNode):
        return "list" if isinstance(value, yaml.SequenceNode) else "map"
    kind = {"string": "text", "boolean": "boolean"}.get(_scalar_type(value), _scalar_type(value))
    if "minimum" in keywords and "maximum" in keywords:
        return f"{kind} {keywords['minimum']}..{keywords['maximum']}"
    return f"{kind} >= {keywords['minimum']}" if "minimum" in keywords else kind


def values_table(rows: list[Row], level: str) -> str:
    """Return the tables of all sections."""
    parts = []
    for section in dict.fromkeys(row.section for row in rows):
        parts += [f"{level} {section}", "", "| Value | Type | Default | Meaning |", "|---|---|---|---|"]
        parts += [
            f"| `{row.path}` | {_cell(row.type)} | `{_cell(row.default)}` | {_cell(row.meaning)} |"
            for row in rows
            if row.section == section
        ]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def values_schema(node: yaml.Node, lines: list[str]) -> str:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": NOTE,
        "title": "Values of the Pagemill chart",
        **schema_of(node, lines),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def reference_page(rows: list[Row]) -> str:
    about = (
        "Set them with `--set` or a values file, which is checked against a schema before anything is installed.\n"
        "How to: [install with Helm](../how-to/install-with-helm.md)."
    )
    return f"# Values of the Helm chart\n\n<!-- {NOTE} -->\n\n{about}\n\n{values_table(rows, '##')}"


def readme(current: str, rows: list[Row]) -> str:
    """Return the chart's README with its tables replaced; the text around them is written by hand."""
    pattern = re.compile(f"{re.escape(README_BEGIN)}.*{re.escape(README_END)}", re.DOTALL)
    if not pattern.search(current):
        raise ValuesError(f"README.md has no {README_BEGIN} ... {README_END}.")
    table = f"{README_BEGIN}\n<!-- {NOTE} -->\n\n{values_table(rows, '###')}\n{README_END}"
    return pattern.sub(lambda _: table, current)


def crd_template(definition: str, name: str = DEFINITIONS[0]) -> str:
    """Return the CRD, of the file `name` in `crds`, as a template: `crds.install` switches it, `crds.keep` and
    `crds.annotations` annotate it.
    """
    body = re.sub(r"^#.*\n", "", definition).replace("{{", '{{ "{{" }}')
    body = body.replace("metadata:\n", 'metadata:\n{{- include "pagemill.crdAnnotations" . }}\n', 1)
    body = body.replace(
        "  labels:\n    app.kubernetes.io/part-of: pagemill\n",
        '  labels:\n    {{- include "pagemill.labels" . | nindent 4 }}\n',
        1,
    )
    note = f"{{{{- /* Generated from crds/{name} by `python charts/generate.py`; do not edit. */ -}}}}"
    return f"{note}\n{{{{- if .Values.crds.install }}}}\n{body}{{{{- end }}}}\n"


def _one_line(document: str) -> str:
    return json.dumps(json.loads(document), separators=(",", ":")) + "\n"


def outputs() -> dict[Path, str]:
    """Return every generated file with its text."""
    text = (CHART / "values.yaml").read_text("utf-8")
    lines = text.splitlines()
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert node is not None
    rows = list(rows_of(node, lines))
    rules, pages = rules_file([alert.document() for alert in ALERTS]), all_pages()
    local_rules = rules_file([alert.document() for alert in ALERTS if not alert.needs_operator])
    return {
        CHART / "values.schema.json": values_schema(node, lines),
        CHART / "README.md": readme((CHART / "README.md").read_text("utf-8"), rows),
        **{
            CHART / "templates" / "crds" / name: crd_template((ROOT / "crds" / name).read_text("utf-8"), name)
            for name in DEFINITIONS
        },
        CHART / "files" / "rules.yaml": rules,
        **{CHART / "files" / "dashboards" / f"{page.uid}.json": dashboard_json(page) for page in pages},
        CLI_FILES / "rules.yaml": local_rules,
        **{RUNBOOKS / Path(alert.runbook).name: (ROOT / alert.runbook).read_text("utf-8") for alert in ALERTS},
        **{CLI_FILES / "dashboards" / f"{page.uid}.json": _one_line(dashboard_json(page)) for page in pages},
        ROOT / "docs" / "reference" / "chart.md": reference_page(rows),
    }


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python charts/generate.py [--check]\n")
        return 2
    try:
        texts = outputs()
    except ValuesError as error:
        sys.stderr.write(f"values.yaml: {error}\n")
        return 1
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        if arguments:
            sys.stderr.write(f"{path.relative_to(ROOT)} differs from its source; run `python charts/generate.py`\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], "utf-8")
    return 1 if arguments and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
