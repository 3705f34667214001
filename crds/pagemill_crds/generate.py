"""Write the files that are generated from the models: `python -m pagemill_crds.generate [--check]`.

`crds/` has the CustomResourceDefinitions `llmdeployments.yaml` and `loraadapters.yaml`, `docs/reference/` their pages.
With `--check` nothing is written, and the exit code is 1 when a file differs from the models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pagemill_crds import (
    ADAPTER_KIND,
    ADAPTER_PLURAL,
    ADAPTER_SHORT_NAMES,
    ADAPTER_SINGULAR,
    API_VERSION,
    CATEGORY,
    GROUP,
    KIND,
    PLURAL,
    SERVED_VERSIONS,
    SHORT_NAMES,
    SINGULAR,
    STORED_VERSION,
)
from pagemill_crds.adapters import LoRAAdapter
from pagemill_crds.explain import Field, adapter_root, root, walk
from pagemill_crds.schema import Schema, structural_schema

ROOT = Path(__file__).resolve().parents[2]
HEADER = "# Generated from crds/pagemill_crds by `python -m pagemill_crds.generate`; do not edit.\n"

PRINTER_COLUMNS = [
    ("MODEL", "string", ".status.plan.modelName", "Name that clients put into `model`."),
    ("READY", "integer", ".status.readyReplicas", "Replicas that take requests."),
    ("DESIRED", "integer", ".status.desiredReplicas", "Replicas wanted now."),
    ("KV%", "integer", ".status.load.kvCacheUsagePercent", "Share of the KV cache held by running requests."),
    ("QUEUE", "integer", ".status.load.requestsWaiting", "Requests that wait for an engine."),
    ("REASON", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why it is ready or not."),
    ("AGE", "date", ".metadata.creationTimestamp", "Time since its creation."),
]
WIDE_COLUMNS = [
    ("VERSION", "string", ".status.plan.engineVersion", "Version of the engine in the pods."),
    ("URL", "string", ".status.url", "Base URL of the OpenAI-compatible API."),
]
"""Columns that `kubectl get -o wide` adds."""
ADAPTER_COLUMNS = [
    ("MODEL", "string", ".status.name", "Name that clients put into `model`."),
    ("DEPLOYMENT", "string", ".spec.deployment", "LLMDeployment whose engines serve it."),
    ("LOADED", "integer", ".status.loadedReplicas", "Replicas that serve it."),
    ("REASON", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why it is ready or not."),
    ("AGE", "date", ".metadata.creationTimestamp", "Time since its creation."),
]
ADAPTER_WIDE_COLUMNS = [("SOURCE", "string", ".spec.source", "Location of its weights.")]


def custom_resource_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of LLMDeployment as a plain object."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    names = (KIND, PLURAL, SINGULAR, SHORT_NAMES)
    return _definition(names, structural_schema(), PRINTER_COLUMNS, WIDE_COLUMNS, {"scale": scale})


def adapter_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of LoRAAdapter as a plain object."""
    names = (ADAPTER_KIND, ADAPTER_PLURAL, ADAPTER_SINGULAR, ADAPTER_SHORT_NAMES)
    return _definition(names, structural_schema(LoRAAdapter), ADAPTER_COLUMNS, ADAPTER_WIDE_COLUMNS, {})


Column = tuple[str, str, str, str]


def _definition(
    names_of: tuple[str, str, str, tuple[str, ...]],
    schema: Schema,
    columns: list[Column],
    wide: list[Column],
    subresources: dict[str, Any],
) -> dict[str, Any]:
    kind, plural, singular, short_names = names_of
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": singular,
        "shortNames": list(short_names),
        "categories": [CATEGORY],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "pagemill"}},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced",
            # The schemas are equal, so that changing `apiVersion` is the whole conversion.
            "conversion": {"strategy": "None"},
            "versions": [_version(name, schema, columns, wide, subresources) for name in SERVED_VERSIONS],
        },
    }


def _version(
    name: str, schema: Schema, columns: list[Column], wide: list[Column], subresources: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "served": True,
        "storage": name == STORED_VERSION,
        "subresources": {"status": {}, **subresources},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": description}
            for name, kind, path, description in columns
        ]
        + [
            {"name": name, "type": kind, "jsonPath": path, "description": description, "priority": 1}
            for name, kind, path, description in wide
        ],
        "schema": {"openAPIV3Schema": schema},
    }


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes block style without anchors, so that equal parts stay readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render_yaml(definition: dict[str, Any]) -> str:
    """Return the text of a definition's file in `crds`."""
    return HEADER + yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=110)


def outputs(root: Path = ROOT) -> dict[Path, str]:
    """Return the text of every generated file by its path."""
    return {
        root / "crds" / "llmdeployments.yaml": render_yaml(custom_resource_definition()),
        root / "crds" / "loraadapters.yaml": render_yaml(adapter_definition()),
        root / "docs" / "reference" / "llmdeployment.md": reference_page(),
        root / "docs" / "reference" / "loraadapter.md": adapter_page(),
    }


def stale_files(root: Path = ROOT) -> list[Path]:
    """Return the generated files that differ from the models."""
    return [path for path, text in outputs(root).items() if not path.is_file() or path.read_text("utf-8") != text]


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        stale = stale_files()
        for path in stale:
            sys.stderr.write(f"{path} differs from the models; run `python -m pagemill_crds.generate`\n")
        return 1 if stale else 0
    if arguments:
        sys.stderr.write("usage: python -m pagemill_crds.generate [--check]\n")
        return 2
    for path, text in outputs().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


OTHERS = ", ".join(f"`{version}`" for version in SERVED_VERSIONS[1:])
ALSO = f" Accepted too, with the same meaning: {OTHERS}." if OTHERS else ""
PAGE_HEADER = f"""# {KIND}

<!-- Generated by `python -m pagemill_crds.generate`; do not edit. -->

`{API_VERSION}`, short name `{SHORT_NAMES[0]}`, category `{CATEGORY}`.{ALSO}
[Upgrades](../how-to/upgrade.md) keep its objects. Unknown fields are refused; a `null` is the same as an absent field.
`pagemill explain PATH` prints the same for one field.
"""


ADAPTER_PAGE_HEADER = f"""# {ADAPTER_KIND}

<!-- Generated by `python -m pagemill_crds.generate`; do not edit. -->

`{API_VERSION}`, short name `{ADAPTER_SHORT_NAMES[0]}`, category `{CATEGORY}`.{ALSO}
[How to serve adapters](../how-to/serve-adapters.md). Unknown fields are refused; a `null` is the same as an absent
field.
"""


def reference_page() -> str:
    """Return the text of `docs/reference/llmdeployment.md`."""
    return PAGE_HEADER + _sections(root())


def adapter_page() -> str:
    """Return the text of `docs/reference/loraadapter.md`."""
    return ADAPTER_PAGE_HEADER + _sections(adapter_root())


def _sections(resource: Field) -> str:
    return "\n" + "\n".join(_section(field) for field in walk(resource) if field.children)


def _section(field: Field) -> str:
    title = field.path.removeprefix("llmdeployment.").removeprefix("loraadapter.")
    lines = [f"## {title}", "", field.description, ""]
    lines += ["| Field | Type | Meaning | Limits |", "|---|---|---|---|"]
    lines += [_row(child) for child in field.children]
    if field.rules:
        lines += ["", "Rules:", "", *(f"- {rule}" for rule in field.rules)]
    return "\n".join([*lines, ""])


def _row(field: Field) -> str:
    name = f"`{field.name}`" + (" (required)" if field.required else "")
    limits = "; ".join(_limits(field))
    return f"| {name} | {field.type} | {_cell(field.description)} | {limits} |"


def _limits(field: Field) -> Iterator[str]:
    for limit in field.limits:
        word, _, value = limit.partition(": ")
        yield f"{word} `{_cell(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
