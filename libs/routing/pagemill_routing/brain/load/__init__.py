"""Measures what the load stream publishes of each deployment: arrivals, queue and load of the engines."""
