"""What the controller tells: events, status, metrics, health."""
