"""The operator's settings with meaning, unit and default. They are read once at start, and only here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagemill_servers.process.settings import read_settings

NAME_LABEL = "app.kubernetes.io/name"
EngineIds = dict[Literal["runAsUser", "runAsGroup", "fsGroup"], int]


class EngineTLSSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS to engines."""

    secret: str = ""
    """Secret in the namespace of each LLMDeployment with `tls.crt` and `tls.key`, which its engines serve, and `ca.crt`
    for Prometheus; empty: engines use HTTP.
    """
    ca_file: str = ""
    """PEM file of the authorities that issued the engines' certificates; it is read again when it changes."""
    server_name: str = ""
    """The name in all of the engines' certificates: pod addresses are not known beforehand."""


class OperatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    namespace: str
    """The release's namespace, which has the Lease, the keys and the gateways."""
    watch_namespaces: list[str] = []
    """Namespaces whose LLMDeployments are served; empty: all namespaces."""
    engine_image: str
    """Image of engine pods whose resource names none."""
    cpu_engine_image: str = ""
    """The same for engine pods without GPUs; empty: `engine_image`."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of engine and loader containers."""
    image_pull_secrets: list[str] = []
    """Names of Secrets in the namespaces of the LLMDeployments."""
    gateway_url: str = ""
    """Base URL of the OpenAI-compatible API, shown in `status.url`."""
    gateway_selector: dict[str, str] = msgspec.field(
        default_factory=lambda: {"app.kubernetes.io/name": "pagemill", "app.kubernetes.io/component": "gateway"}
    )
    """Labels of gateway pods in `namespace`. Must contain `app.kubernetes.io/name`, by which pods are watched."""
    operator_selector: dict[str, str] = msgspec.field(
        default_factory=lambda: {"app.kubernetes.io/name": "pagemill", "app.kubernetes.io/component": "operator"}
    )
    """Labels of the operator's pods in `namespace`: engines accept sleep and wake calls from them."""
    prometheus_namespace_selector: dict[str, str] = {}
    """Labels of the namespace that Prometheus runs in."""
    prometheus_pod_selector: dict[str, str] = {}
    """Labels of Prometheus's pods, which may reach engines beside gateways and the operator; if both selectors are
    empty, no other pod may.
    """
    engine_ids: EngineIds = msgspec.field(
        default_factory=lambda: {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
    )
    """User and groups of the pods of engines and loaders, those of the images; `{}` leaves them to the platform, as
    OpenShift assigns them from a range of each namespace."""
    engine_extra_egress: list[dict[str, Any]] = []
    """Additional egress rules in the NetworkPolicies of engines, in Kubernetes's format; `[{}]` allows everything.
    Without them, engines and loaders reach DNS and, with an `hf://` source, port 443 outside the node and the ports in
    `HF_ENDPOINT`, `HTTPS_PROXY`, `HTTP_PROXY` and `ALL_PROXY`.
    """
    keys_secret: str = "pagemill-keys"
    """Secret in `namespace` from which engine tokens are derived; it is created if it is missing."""
    lease_name: str = "pagemill-operator"
    """Lease in `namespace` that names the leader."""
    lease_duration_s: float = 15.0
    """Seconds without a renewal after which another operator takes the Lease over."""
    renew_deadline_s: float = 10.0
    """Seconds without a renewal after which the leader stops writing; it exits once another operator leads."""
    retry_period_s: float = 2.0
    """Seconds between two reads of the Lease."""
    resync_s: float = 600.0
    """Seconds between two full comparisons, plus or minus a tenth."""
    key_rotation_s: float = 86_400.0
    """Seconds between two key rotations; a token is accepted for three of these periods."""
    workers: int = 4
    """Number of deployments that are reconciled concurrently."""
    host: str = "::"
    """Address of the metrics port; `::` is every address of both families."""
    metrics_port: int = 8080
    """Port of `/metrics`, `/livez` and `/readyz`; 0 takes a free one."""
    gateway_control_port: int = 8081
    """Port on which gateways serve the load stream."""
    engine_control_port: int = 8001
    """Port on which engines without TLS accept sleep and wake calls."""
    engine_tls: EngineTLSSettings = EngineTLSSettings()
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged; `DEBUG` includes kopf's lines."""

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        if not self.namespace:
            yield "namespace is empty: name the namespace of the release"
        if not self.engine_image:
            yield "engine_image is empty: name the image that engine pods run"
        if NAME_LABEL not in self.gateway_selector:
            yield f"gateway_selector {self.gateway_selector} has no {NAME_LABEL}: add it, pods are watched by it"
        if not 0 < self.retry_period_s < self.renew_deadline_s < self.lease_duration_s:
            yield (
                f"retry_period_s {self.retry_period_s:g}, renew_deadline_s {self.renew_deadline_s:g} and "
                f"lease_duration_s {self.lease_duration_s:g} must rise in this order and be above 0"
            )
        if self.engine_tls.secret and not (self.engine_tls.ca_file and self.engine_tls.server_name):
            yield "engine_tls.secret is set: name the authority in engine_tls.ca_file, and engine_tls.server_name"
        for field in ("resync_s", "key_rotation_s"):
            if getattr(self, field) < 1:
                yield f"{field} is {getattr(self, field):g}: use 1 second or more"
        if not 1 <= self.workers <= 64:
            yield f"workers is {self.workers}: use 1 to 64"
        for field in ("metrics_port", "gateway_control_port"):
            if not 0 <= getattr(self, field) <= 65_535:
                yield f"{field} is {getattr(self, field)}: use 0 to 65535"


def load_config(path: Path) -> OperatorConfig:
    """Read the settings file. Raises `SettingsError` if it cannot be used."""
    return read_settings(path, OperatorConfig)
