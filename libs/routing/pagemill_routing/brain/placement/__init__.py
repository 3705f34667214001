"""Placement of requests: eligible endpoints, their state for the routing policy, the decision and its record."""
