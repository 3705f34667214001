"""LLMDeployment: the one source of the custom resource, its schema and its YAML."""
