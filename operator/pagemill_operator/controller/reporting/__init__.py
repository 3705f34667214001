"""What the controller reports: events, status, metrics, health."""
