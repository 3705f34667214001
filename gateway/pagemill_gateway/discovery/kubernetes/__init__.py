"""Builds the catalogue from a cluster's objects: LLMDeployments, EndpointSlices and the Secret with the keys."""
