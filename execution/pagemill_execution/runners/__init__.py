"""Executes one scheduled step on a device: persistent input arrays, forward pass, sampling."""
