"""Command lines and configuration files of the one-node cluster's components. `one_node` starts them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import binaries
import credentials
from layout import (
    API_PORT,
    AUDIT_LOG,
    BRIDGE,
    CONTAINERD_SOCKET,
    FAMILIES,
    IMAGES,
    KUBECONFIG,
    NODE,
    NODE_IP,
    PAUSE_IMAGE,
    RUN,
)

HERE = Path(__file__).resolve().parent
CERTIFICATE = RUN / "apiserver.crt"
KEY = RUN / "apiserver.key"
REGISTRIES = "registries"
"""The folder with a `HOST/hosts.toml` for each registry that does not use plain HTTPS; it is read at each pull."""
FRONT_PROXY = "front-proxy"
"""Certificate and authority in one, with which the API server authenticates to aggregated API servers (metrics APIs).
"""
SERVER_NAMES = (
    "DNS:localhost",
    "DNS:kubernetes.default.svc",
    "DNS:kubernetes.default",
    "IP:127.0.0.1",
    *(f"IP:{address}" for family in FAMILIES for address in (family.node_ip, family.kubernetes_service_ip)),
)
USERS: dict[str, Sequence[str]] = {
    "admin": ["system:masters"],
    f"system:node:{NODE}": ["system:nodes"],
    "system:kube-controller-manager": [],
    "system:kube-scheduler": [],
    "system:kube-proxy": [],
    # Kubernetes has no roles for these programs. With users of their own, the audit log separates them from tests.
    "e2e:coredns": ["system:masters"],
    "e2e:storage": ["system:masters"],
    "e2e:kwok": ["system:masters"],
    "e2e:lws": ["system:masters"],
}
API_RATE = ("--kube-api-qps=300", "--kube-api-burst=500")
"""Higher limits than the default of 20 requests per second, which would dominate a test with thousands of objects."""
START_ORDER = (
    "etcd",
    "containerd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "coredns",
    "storage",
    "kubelet",
)


def argv(name: str) -> list[str]:
    """Return the command line of a component."""
    if name == "storage":
        return [sys.executable, str(HERE / "storage.py"), str(kubeconfig("e2e:storage"))]
    return [str(binaries.bin_dir() / name), *_FLAGS[name]()]


def kubeconfig(user: str) -> Path:
    return KUBECONFIG if user == "admin" else RUN / f"{user.replace(':', '-')}.conf"


def configure() -> None:
    """Write certificates, tokens and the configuration of every component."""
    credentials.make_certificate(RUN / "apiserver", SERVER_NAMES)
    credentials.make_certificate(RUN / FRONT_PROXY, [f"DNS:{FRONT_PROXY}"])
    tokens = credentials.make_tokens(RUN / "tokens.csv", USERS)
    server = f"https://[{NODE_IP}]:{API_PORT}" if ":" in NODE_IP else f"https://{NODE_IP}:{API_PORT}"
    for user, token in tokens.items():
        credentials.write_kubeconfig(kubeconfig(user), server=server, authority=CERTIFICATE, token=token)
    (RUN / "cni").mkdir(exist_ok=True)
    _write_json("cni/10-bridge.conflist", _network())
    _write_json("audit.yaml", _audit_policy())
    _write_json("kubelet.yaml", _kubelet())
    _write_json("kube-proxy.yaml", _kube_proxy())
    (RUN / "containerd.toml").write_text(_containerd())
    (RUN / "Corefile").write_text(_corefile())


def _etcd_flags() -> list[str]:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        f"--data-dir={RUN / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


def _apiserver_flags() -> list[str]:
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        f"--bind-address={NODE_IP}",
        f"--advertise-address={NODE_IP}",
        f"--secure-port={API_PORT}",
        f"--tls-cert-file={CERTIFICATE}",
        f"--tls-private-key-file={KEY}",
        f"--token-auth-file={RUN / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--service-cluster-ip-range={','.join(family.service_range for family in FAMILIES)}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={KEY}",
        f"--service-account-signing-key-file={KEY}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--proxy-client-cert-file={RUN / FRONT_PROXY}.crt",
        f"--proxy-client-key-file={RUN / FRONT_PROXY}.key",
        f"--requestheader-client-ca-file={RUN / FRONT_PROXY}.crt",
        f"--requestheader-allowed-names={FRONT_PROXY}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--audit-policy-file={RUN / 'audit.yaml'}",
        f"--audit-log-path={AUDIT_LOG}",
        "--audit-log-maxsize=10000",  # never rotated, because tests continue reading from an offset
    ]


def _controller_manager_flags() -> list[str]:
    return [
        f"--kubeconfig={kubeconfig('system:kube-controller-manager')}",
        f"--service-account-private-key-file={KEY}",
        f"--root-ca-file={CERTIFICATE}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        *API_RATE,
    ]


def _scheduler_flags() -> list[str]:
    return [f"--kubeconfig={kubeconfig('system:kube-scheduler')}", "--leader-elect=false", *API_RATE]


def _kubelet_flags() -> list[str]:
    return [
        f"--config={RUN / 'kubelet.yaml'}",
        f"--kubeconfig={kubeconfig(f'system:node:{NODE}')}",
        f"--hostname-override={NODE}",
        f"--node-ip={','.join(family.node_ip for family in FAMILIES)}",
        f"--root-dir={RUN / 'kubelet'}",
        f"--cert-dir={RUN / 'kubelet-pki'}",
    ]


_FLAGS: dict[str, Callable[[], list[str]]] = {
    "etcd": _etcd_flags,
    "kube-apiserver": _apiserver_flags,
    "kube-controller-manager": _controller_manager_flags,
    "kube-scheduler": _scheduler_flags,
    "kubelet": _kubelet_flags,
    "kube-proxy": lambda: [f"--config={RUN / 'kube-proxy.yaml'}"],
    "containerd": lambda: ["--config", str(RUN / "containerd.toml")],
    "coredns": lambda: ["-conf", str(RUN / "Corefile")],
}


def _network() -> dict[str, Any]:
    """Return the network configuration: pods on one bridge, reachable only from this machine, without masquerading."""
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(RUN / "ipam"),
            "ranges": [[{"subnet": family.pod_range, "rangeStart": family.first_pod_ip}] for family in FAMILIES],
            "routes": [{"dst": family.anywhere} for family in FAMILIES],
        },
    }
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def _audit_policy() -> dict[str, Any]:
    """Return an audit policy that logs each request not made by Kubernetes itself: tests count an operator's writes."""
    parts = {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]}
    users = {"level": "None", "users": [user for user in USERS if user != "admin"] + ["system:apiserver"]}
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "omitManagedFields": True,
        "rules": [parts, users, {"level": "None", "nonResourceURLs": ["*"]}, {"level": "Metadata"}],
    }


def _kubelet() -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "clusterDNS": [NODE_IP],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "failCgroupV1": False,
        "failSwapOn": False,
        # Images stay until they are removed explicitly, because loading the engine's again takes minutes.
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "maxPods": 200,
        "oomScoreAdj": 0,
        "serializeImagePulls": False,
    }


def _kube_proxy() -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": ",".join(family.pod_range for family in FAMILIES),
        "clientConnection": {"kubeconfig": str(kubeconfig("system:kube-proxy"))},
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "hostnameOverride": NODE,
        "metricsBindAddress": "127.0.0.1:10249",
    }


def _containerd() -> str:
    return f"""version = 3
root = "{IMAGES}"
state = "{RUN}/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.images'.registry]
  config_path = "{RUN}/{REGISTRIES}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  disable_apparmor = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "{RUN}/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""


def _corefile() -> str:
    return f""".:53 {{
  bind {NODE_IP}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig("e2e:coredns")}
    ttl 5
  }}
  cache 5
}}
"""


def _write_json(path: str, content: dict[str, Any]) -> None:
    (RUN / path).write_text(json.dumps(content, indent=2))
