"""The pagemill command and the offline API."""
