"""The catalogue from a cluster's objects: watched LLMDeployments, EndpointSlices and the Secret of the keys."""
