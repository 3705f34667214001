"""Turns what other platforms read into an LLMDeployment: one file for each of them."""
