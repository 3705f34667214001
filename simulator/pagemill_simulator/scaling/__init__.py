"""Scaling policies in one simulation: Pagemill's own autoscaler and those of other platforms, behind one small
protocol.
"""
