"""What several programs read of the LLMDeployment resource, of which `pagemill_crds` is the source."""
