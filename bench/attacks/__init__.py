"""Attacks on a gateway and its engines, and the honest tenant beside them; `bench/attack.py` runs them."""
