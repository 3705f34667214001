"""Simulations in virtual time around the real scheduler, block manager and gateway logic."""
