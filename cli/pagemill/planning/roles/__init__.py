"""A forecast of replicas split by role (prefill, decode) for `pagemill plan`; no engine serves roles yet."""
