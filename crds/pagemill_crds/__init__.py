"""LLMDeployment: the one source of the custom resource, its schema and its YAML.

`models` holds the resource as strict pydantic models; `schema` and `generate` write the CustomResourceDefinition from
them; `reference` and `explain` the documentation. Knows no cluster and no process: the operator does.
"""

GROUP = "pagemill.dev"
SERVED_VERSIONS = ("v1beta1", "v1alpha1")
"""Every version that the API server takes and gives, the newest first; all have one schema."""
VERSION = SERVED_VERSIONS[0]
"""What manifests, messages and pages name."""
STORED_VERSION = "v1alpha1"
"""
What etcd holds, and what operator, gateway and command line read and write. The release before serves it too, so that a
release can be rolled back: the API server refuses a definition without a version in which objects may be stored. It
becomes `VERSION` one minor version after that one was first served (docs/adr/0066-versions-of-the-resource.md).
"""
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
SINGULAR = "llmdeployment"
SHORT_NAMES = ("llmd",)
CATEGORY = "pagemill"
API_VERSION = f"{GROUP}/{VERSION}"
STORED_API_VERSION = f"{GROUP}/{STORED_VERSION}"
