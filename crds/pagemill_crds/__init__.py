"""The custom resources LLMDeployment and LoRAAdapter: the only source of their types, their schemas and their YAML.

`models` and `adapters` hold the resources as strict pydantic models; `schema` and `generate` write the
CustomResourceDefinitions and the reference pages from them; `explain` describes fields. The package uses no cluster and
no process: the operator does.
"""

from __future__ import annotations

GROUP = "pagemill.dev"
SERVED_VERSIONS: tuple[str, ...] = ("v1beta1",)
"""All versions that the API server accepts and returns, newest first; they share one schema."""
VERSION = SERVED_VERSIONS[0]
"""The version that manifests, messages and pages name."""
STORED_VERSION = "v1beta1"
"""The version that etcd stores, and that operator, gateway and command line read and write.

The previous release serves it too, so that a release can be rolled back: the API server refuses a definition that lacks
a version in which objects may be stored. `VERSION` becomes the stored version one minor release after it was first
served (docs/adr/0066-versions-of-the-resource.md).
"""
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
SINGULAR = "llmdeployment"
SHORT_NAMES = ("llmd",)
ADAPTER_KIND = "LoRAAdapter"
ADAPTER_PLURAL = "loraadapters"
ADAPTER_SINGULAR = "loraadapter"
ADAPTER_SHORT_NAMES = ("lora",)
CATEGORY = "pagemill"
API_VERSION = f"{GROUP}/{VERSION}"
STORED_API_VERSION = f"{GROUP}/{STORED_VERSION}"
