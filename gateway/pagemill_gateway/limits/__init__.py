"""The limits of API keys and tenants: requests and tokens per minute, concurrency, and token budgets."""
