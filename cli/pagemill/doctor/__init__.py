"""`pagemill doctor`: what serving needs, looked at one by one; `machine` and `cluster` look, `findings` shows."""
