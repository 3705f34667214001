"""Kubernetes's external metrics API on the one-node cluster: Prometheus and its adapter, in one pod.

Both use the files in examples/external-scaling, as users do, with shorter intervals. The other objects of the adapter's
chart (service account, roles, APIService) are created here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from support.clusters import OneNode, program
from support.objects import Document, namespace
from support.programs import built_folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "external-scaling"
NAME = "e2e-metrics"
"""The name of every object and of their namespace."""
LABELS = {"app.kubernetes.io/name": "prometheus"}
"""Labels of pods that the chart allows to scrape by default."""
SCRAPE_INTERVAL = "5s"
GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
API_SERVICE = f"apiservice/{VERSION}.{GROUP}"
ADAPTER_PORT = 6443
READY_TIMEOUT_S = 180.0
RBAC = "rbac.authorization.k8s.io"


@contextmanager
def served(node: OneNode) -> Iterator[None]:
    """Serve external metrics while the block runs; the first call builds the adapter and the image."""
    image = f"docker.io/library/metrics:{built_folder().parent.name}"
    program("metrics", image)
    kubectl = node.kubectl
    kubectl.apply(namespace(NAME))
    try:
        kubectl.apply(*_accounts(), _configuration(), _pod(image), _service(), _api_service())
        kubectl.within(NAME).wait(f"pod/{NAME}", "condition=Ready", READY_TIMEOUT_S)
        kubectl.wait(API_SERVICE, "condition=Available", READY_TIMEOUT_S)
        yield
    finally:
        # Delete this first: a namespace cannot be deleted while an API without a pod is registered.
        kubectl.delete(API_SERVICE, "--ignore-not-found")
        for target in (f"clusterrole/{NAME}", f"clusterrolebinding/{NAME}", f"clusterrolebinding/{NAME}-delegator"):
            kubectl.delete(target, "--ignore-not-found")
        kubectl.within("kube-system").delete(f"rolebinding/{NAME}", "--ignore-not-found")
        kubectl.delete(f"namespace/{NAME}", "--ignore-not-found")


def _configuration() -> Document:
    """Return the users' files as a ConfigMap; the adapter's chart makes such a file from its values."""
    scrapes = yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text())
    scrapes["global"]["scrape_interval"] = SCRAPE_INTERVAL
    rules = yaml.safe_load((EXAMPLES / "prometheus-adapter.yaml").read_text())["rules"]
    adapter = {"rules": [], "externalRules": rules["external"]}
    texts = {"prometheus.yaml": json.dumps(scrapes), "adapter.yaml": json.dumps(adapter)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _named(), "data": texts}


def _pod(image: str) -> Document:
    prometheus = [
        "prometheus",
        "--config.file=/etc/metrics/prometheus.yaml",
        "--storage.tsdb.path=/data",
        "--web.listen-address=127.0.0.1:9090",
    ]
    adapter = [
        "prometheus-adapter",
        "--config=/etc/metrics/adapter.yaml",
        "--prometheus-url=http://127.0.0.1:9090",
        f"--secure-port={ADAPTER_PORT}",
        "--cert-dir=/data/certificates",
        f"--metrics-relist-interval={SCRAPE_INTERVAL}",
        "--metrics-max-age=1m",
    ]
    # Starting engines use all processors; an adapter that is marked unready meanwhile would answer no request.
    patience = {"periodSeconds": 1, "timeoutSeconds": 10, "failureThreshold": 6}
    readiness = {"httpGet": {"path": "/readyz", "port": ADAPTER_PORT, "scheme": "HTTPS"}, **patience}
    mounts = [{"name": "config", "mountPath": "/etc/metrics"}, {"name": "data", "mountPath": "/data"}]
    resources = {"requests": {"cpu": "100m", "memory": "128Mi"}}
    common = {"image": image, "imagePullPolicy": "Never", "resources": resources, "volumeMounts": mounts}
    spec = {
        "serviceAccountName": NAME,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532},
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {"name": "prometheus", "command": prometheus, **common},
            {"name": "adapter", "command": adapter, "readinessProbe": readiness, **common},
        ],
        "volumes": [{"name": "config", "configMap": {"name": NAME}}, {"name": "data", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**_named(), "labels": LABELS}, "spec": spec}


def _service() -> Document:
    spec = {"selector": LABELS, "ports": [{"port": 443, "targetPort": ADAPTER_PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _named(), "spec": spec}


def _api_service() -> Document:
    spec = {
        "group": GROUP,
        "version": VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,  # as by the chart's default, the adapter creates its own certificate
        "service": {"name": NAME, "namespace": NAME},
    }
    metadata = {"name": f"{VERSION}.{GROUP}"}
    return {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": metadata, "spec": spec}


def _accounts() -> list[Document]:
    """Return accounts and roles: Prometheus lists pods; the adapter authenticates and authorizes callers."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _named()}
    finds = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    role = {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": NAME}, "rules": finds}
    reader = _binding("RoleBinding", {"name": NAME, "namespace": "kube-system"}, "Role", AUTHENTICATION_READER)
    return [
        account,
        role,
        _binding("ClusterRoleBinding", {"name": NAME}, "ClusterRole", NAME),
        _binding("ClusterRoleBinding", {"name": f"{NAME}-delegator"}, "ClusterRole", "system:auth-delegator"),
        reader,
    ]


AUTHENTICATION_READER = "extension-apiserver-authentication-reader"


def _binding(kind: str, metadata: Document, role_kind: str, role: str) -> Document:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": RBAC, "kind": role_kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": NAME}],
    }


def _named() -> Document:
    return {"name": NAME, "namespace": NAME}
