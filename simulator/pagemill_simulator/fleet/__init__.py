"""A deployment of many pods on a virtual clock: arrivals, routing, cold starts, failures and scaling in one run."""
