"""Scaling policies on one bench: Pagemill's own autoscaler and those of other platforms, behind one small protocol."""
