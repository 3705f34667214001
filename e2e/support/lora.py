"""LoRA adapters of the embedded model in a bucket on the node's own address, and the resource `LoRAAdapter`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from s3_server import KEY, SECRET, CuttingProxy, running_s3_server
from safetensors.numpy import save
from support.clusters import Cluster
from support.kubectl import Kubectl
from support.model_servers import node_address
from support.objects import Document, llmdeployment, merged
from support.waiting import until

BUCKET = "adapters"
NUM_LAYERS, HIDDEN, VALUES = 30, 576, 192
"""Of SmolLM2-135M: layers, hidden units, and rows of the values' projection."""
RANK, LARGEST_RANK = 8, 16


@dataclass(frozen=True)
class AdapterBucket:
    """Adapters `sales`, `support` and `large`, whose rank is too large, behind a proxy that can be slowed down."""

    proxy: CuttingProxy

    def deployment(self, name: str, **sections: object) -> Document:
        """Return a deployment with places for adapters, whose engines may read the bucket."""
        env = {"AWS_ENDPOINT_URL": self.proxy.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        engine = {
            "lora": {"maxLoras": 2, "maxLoraRank": LARGEST_RANK},
            "env": [{"name": key, "value": value} for key, value in env.items()],
        }
        return merged(llmdeployment(name, engine=engine), {"spec": sections})


@contextmanager
def adapter_bucket(cluster: Cluster, folder: Path) -> Iterator[AdapterBucket]:
    files = {
        f"{name}/{path}": content
        for seed, (name, rank) in enumerate({"sales": RANK, "support": RANK, "large": 2 * LARGEST_RANK}.items())
        for path, content in _files(seed, rank).items()
    }
    with running_s3_server(folder) as server:
        server.put(BUCKET, files)
        proxy = CuttingProxy(server.port, host=node_address(cluster))
        try:
            yield AdapterBucket(proxy)
        finally:
            proxy.close()


def _files(seed: int, rank: int) -> dict[str, bytes]:
    """Return the files of an adapter of the values, as PEFT writes them, which changes every answer."""
    draw, tensors = np.random.default_rng(seed), {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        for side, shape in (("A", (rank, HIDDEN)), ("B", (VALUES, rank))):
            tensors[f"{name}.lora_{side}.weight"] = draw.normal(0, 0.2, shape).astype(np.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["v_proj"], "bias": "none"}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


def adapter(name: str, deployment: str, source: str, /, **spec: object) -> Document:
    """Return a LoRAAdapter. `source`: a name in the bucket."""
    return {
        "apiVersion": "pagemill.dev/v1beta1",
        "kind": "LoRAAdapter",
        "metadata": {"name": name},
        "spec": {"deployment": deployment, "source": f"s3://{BUCKET}/{source}", **spec},
    }


def wait_adapter(kubectl: Kubectl, name: str, kind: str, reason: str, timeout_s: float = 180) -> Document:
    """Wait until a condition of a LoRAAdapter has the reason; return the status, and the condition's message in
    `message`."""

    def found() -> Document | None:
        status: Document = kubectl.json("get", "lora", name).get("status", {})
        conditions = [each for each in status.get("conditions", []) if each["type"] == kind]
        if [each["reason"] for each in conditions] != [reason]:
            return None
        return {**status, "message": conditions[0]["message"]}

    return until(f"lora/{name}: condition {kind} has reason {reason}", found, timeout_s=timeout_s) or {}
