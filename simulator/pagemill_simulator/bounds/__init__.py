"""Bounds of what a scaling policy can reach, found by the simulation itself: `clairvoyant` and `informed`."""
