"""The controller's turns of scaling and of standby, and their records."""
