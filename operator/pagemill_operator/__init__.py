"""The operator: it turns LLMDeployments into plans, and plans into local processes or pods."""
