"""Simulated fleets side by side: a page with a table and plots, and the plots as pictures."""
