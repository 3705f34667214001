"""What the gateway knows of each endpoint and deployment: reports, dispatched requests, adapters, start times."""
