"""What the controller sees: objects of the cluster, and the load that gateways report."""
