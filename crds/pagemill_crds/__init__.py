"""LLMDeployment: the one source of the custom resource, its schema and its YAML.

`models` holds the resource as strict pydantic models; `schema` and `generate` write the CustomResourceDefinition from
them; `reference` and `explain` the documentation. Knows no cluster and no process: the operator does.
"""

GROUP = "pagemill.dev"
VERSION = "v1alpha1"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
SINGULAR = "llmdeployment"
SHORT_NAMES = ("llmd",)
CATEGORY = "pagemill"
API_VERSION = f"{GROUP}/{VERSION}"
