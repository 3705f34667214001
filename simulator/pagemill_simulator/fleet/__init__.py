"""A deployment of many pods in virtual time: arrivals, routing, cold starts, failures and scaling in one run."""
