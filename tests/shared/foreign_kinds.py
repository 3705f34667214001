"""JSON schemas of other projects' kinds that Pagemill writes, restricted to the fields that its manifests use.

Kubernetes' own schemas come in a package; there is none for these. They are written by hand from the API references of
the Prometheus operator (monitoring.coreos.com/v1) and of Gateway API (gateway.networking.k8s.io/v1): names, types,
bounds, and fields that exclude each other. A field that is missing here is refused and must be added when it is used.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]


def _record(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _text(pattern: str = "", at_least: int = 0, at_most: int = 10**6) -> Schema:
    return {"type": "string", "pattern": pattern, "minLength": at_least, "maxLength": at_most}


def _list(items: Schema, at_least: int = 0, at_most: int = 10**6) -> Schema:
    return {"type": "array", "items": items, "minItems": at_least, "maxItems": at_most}


def _one_of(*names: str) -> Schema:
    return {"enum": list(names)}


TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION = _text(r"^(0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?)$", at_least=1)
"""Prometheus' durations: each unit once, from large to small."""
ROUTE_DURATION = _text(r"^(\d{1,5}(h|m|s|ms)){1,4}$")

OWNER = _record(
    *("apiVersion", "kind", "name", "uid"),
    apiVersion=_text(),
    kind=_text(),
    name=_text(),
    uid=_text(),
    controller={"type": "boolean"},
    blockOwnerDeletion={"type": "boolean"},
)
METADATA = _record(
    "name",
    name=_text(at_least=1, at_most=253),
    namespace=_text(at_least=1, at_most=63),
    labels=TEXTS,
    annotations=TEXTS,
    ownerReferences=_list(OWNER),
)


def _kind(api_version: str, name: str, spec: Schema) -> Schema:
    return _record(
        *("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind={"const": name},
        metadata=METADATA,
        spec=spec,
    )


ACTIONS = (
    *("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep", "lowercase", "uppercase"),
    *("keepequal", "dropequal", "Replace", "Keep", "Drop", "HashMod", "LabelMap", "LabelDrop", "LabelKeep"),
    *("Lowercase", "Uppercase", "KeepEqual", "DropEqual"),
)
RELABELINGS = _list(
    _record(
        sourceLabels=_list(_text("^[a-zA-Z_][a-zA-Z0-9_]*$")),
        separator=_text(),
        targetLabel=_text(),
        regex=_text(),
        modulus={"type": "integer", "minimum": 0},
        replacement=_text(),
        action=_one_of(*ACTIONS),
    )
)
ENDPOINTS = _list(
    _record(
        port=_text(),
        path=_text(),
        interval=DURATION,
        honorLabels={"type": "boolean"},
        relabelings=RELABELINGS,
        metricRelabelings=RELABELINGS,
    )
)
PODS = _record(matchLabels=TEXTS)

POD_MONITOR = _kind(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    _record(
        *("selector", "podMetricsEndpoints"),
        selector=PODS,
        podMetricsEndpoints=ENDPOINTS,
        podTargetLabels=_list(_text()),
    ),
)
SERVICE_MONITOR = _kind(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    _record("selector", "endpoints", selector=PODS, endpoints=ENDPOINTS),
)

EXPRESSION: Schema = {"type": ["string", "integer"]}
RULE: Schema = {
    "oneOf": [
        _record(
            *("alert", "expr"),
            alert=_text(at_least=1),
            expr=EXPRESSION,
            labels=TEXTS,
            annotations=TEXTS,
            keep_firing_for=DURATION,
            **{"for": DURATION},
        ),
        _record("record", "expr", record=_text("^[a-zA-Z_:][a-zA-Z0-9_:]*$"), expr=EXPRESSION, labels=TEXTS),
    ]
}
GROUP = _record(
    "name",
    name=_text(at_least=1),
    interval=DURATION,
    limit={"type": "integer"},
    labels=TEXTS,
    query_offset=DURATION,
    rules=_list(RULE),
)
PROMETHEUS_RULE = _kind("monitoring.coreos.com/v1", "PrometheusRule", _record(groups=_list(GROUP)))

HOST = _text(r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", at_least=1, at_most=253)
OBJECT_NAME = _text(at_least=1, at_most=253)
HEADERS = _list(_record("name", "value", name=_text(at_least=1, at_most=256), value=_text(at_least=1)), at_most=16)
HEADER_FILTER = _record(set=HEADERS, add=HEADERS, remove=_list(_text(), at_most=16))
FILTERS = {
    "RequestHeaderModifier": {"requestHeaderModifier": HEADER_FILTER},
    "ResponseHeaderModifier": {"responseHeaderModifier": HEADER_FILTER},
    "ExtensionRef": {
        "extensionRef": _record("group", "kind", "name", group=_text(), kind=_text(at_least=1), name=OBJECT_NAME)
    },
}
"""Filters by type; each has the field of its own name and no other. `RequestRedirect` excludes `backendRefs`, which the
project's rules always have.
"""
ROUTE_RULE = _record(
    matches=_list(
        _record(
            path=_record(
                type=_one_of("Exact", "PathPrefix", "RegularExpression"), value=_text("^/", at_least=1, at_most=1024)
            )
        ),
        at_most=64,
    ),
    filters=_list(
        {"oneOf": [_record("type", *fields, type={"const": type_}, **fields) for type_, fields in FILTERS.items()]},
        at_most=16,
    ),
    timeouts=_record(request=ROUTE_DURATION, backendRequest=ROUTE_DURATION),
    backendRefs=_list(_record("name", "port", name=OBJECT_NAME, port=PORT), at_most=16),
)
HTTP_ROUTE = _kind(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    _record(
        parentRefs=_list(
            _record(
                "name",
                name=OBJECT_NAME,
                namespace=_text(at_least=1, at_most=63),
                group=_text(at_most=253),
                kind=_text(at_least=1, at_most=63),
                sectionName=OBJECT_NAME,
                port=PORT,
            ),
            at_most=32,
        ),
        hostnames=_list(HOST, at_most=16),
        rules=_list(ROUTE_RULE, at_least=1, at_most=16),
    ),
)

VALIDATORS = {
    schema["properties"]["kind"]["const"]: jsonschema.Draft202012Validator(schema)
    for schema in (POD_MONITOR, SERVICE_MONITOR, PROMETHEUS_RULE, HTTP_ROUTE)
}
"""Validators by kind."""
