"""The handling of failures: ejection of endpoints, retries of requests, and detection of poison requests."""
