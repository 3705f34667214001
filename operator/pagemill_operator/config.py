"""The operator's settings: every knob with meaning, unit and default. Read once at start, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

NAME_LABEL = "app.kubernetes.io/name"


class SettingsError(ValueError):
    """The settings cannot be used; the message names the field, its value and the remedy."""


class EngineTLSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS to engines."""

    secret: str = ""
    """Secret in the namespace of each LLMDeployment with `tls.crt` and `tls.key`, which its engines serve, and `ca.crt`
    for Prometheus; empty: engines speak HTTP."""
    ca_file: str = ""
    """Certificates of the authorities that issued them, in PEM, read again when it changes."""
    server_name: str = ""
    """The name in each of their certificates: addresses of pods are not known before."""


class OperatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    namespace: str
    """The release's namespace: Lease, keys and gateways are there."""
    watch_namespaces: list[str] = []
    """Namespaces whose LLMDeployments are served; empty: all of the cluster."""
    engine_image: str
    """Image of engine pods whose resource names none."""
    cpu_engine_image: str = ""
    """Image of those without GPUs; empty: `engine_image`."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of engine and loader containers."""
    image_pull_secrets: list[str] = []
    """Names of Secrets in the namespaces of the LLMDeployments."""
    gateway_url: str = ""
    """Base URL of the OpenAI-compatible API, shown in `status.url`."""
    gateway_selector: dict[str, str] = msgspec.field(
        default_factory=lambda: {"app.kubernetes.io/name": "pagemill", "app.kubernetes.io/component": "gateway"}
    )
    """Labels of gateway pods in `namespace`. Must hold `app.kubernetes.io/name`: pods are watched by it."""
    operator_selector: dict[str, str] = msgspec.field(
        default_factory=lambda: {"app.kubernetes.io/name": "pagemill", "app.kubernetes.io/component": "operator"}
    )
    """Labels of the operator's own pods there: engines let them put them to sleep and wake them."""
    prometheus_namespace_selector: dict[str, str] = {}
    """Labels of the namespace that Prometheus runs in."""
    prometheus_pod_selector: dict[str, str] = {}
    """Labels of Prometheus' pods. Besides gateways and the operator they alone reach engines; where both are empty no
    other pod does."""
    engine_extra_egress: list[dict[str, Any]] = []
    """Further egress rules in the NetworkPolicies of engines, as Kubernetes writes them; `[{}]` allows everything. By
    themselves engines and loaders reach DNS and, with an `hf://` source, port 443 outside the node and the ports in
    `HF_ENDPOINT`, `HTTPS_PROXY`, `HTTP_PROXY` and `ALL_PROXY`."""
    keys_secret: str = "pagemill-keys"
    """Secret in `namespace` that engine tokens are derived from; made where it is missing."""
    lease_name: str = "pagemill-operator"
    """Lease in `namespace` that says who leads."""
    lease_duration_s: float = 15.0
    """Another operator takes over when the Lease was not renewed for this long."""
    renew_deadline_s: float = 10.0
    """The leader writes nothing when it could not renew for this long, and ends when another one leads."""
    retry_period_s: float = 2.0
    """Between two looks at the Lease."""
    resync_s: float = 600.0
    """Everything is compared anew this often, give or take a tenth."""
    key_rotation_s: float = 86_400.0
    """A new key joins this often; a token is accepted for three of these periods."""
    workers: int = 4
    """Deployments that are reconciled at once."""
    host: str = "0.0.0.0"
    """Address of the metrics port."""
    metrics_port: int = 8080
    """Serves `/metrics`, `/livez` and `/readyz`; 0 takes a free one."""
    gateway_control_port: int = 8081
    """Where gateways serve the load stream."""
    engine_control_port: int = 8001
    """Where engines that speak HTTP take the calls to sleep and to wake up."""
    engine_tls: EngineTLSConfig = EngineTLSConfig()
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe lines that are written; `DEBUG` includes kopf's."""

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
    """Raises `SettingsError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=OperatorConfig)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give --settings a readable JSON file") from None
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path}: {error}; correct this field") from None
