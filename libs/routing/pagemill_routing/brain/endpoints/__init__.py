"""The state of each endpoint and deployment: reports, dispatched requests, adapters, start times."""
