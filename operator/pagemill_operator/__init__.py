"""LLMDeployment to plan, plan to running processes or pods."""
