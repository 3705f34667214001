"""The parts of `pagemill doctor`: `machine` and `cluster` check what serving needs, `findings` shows the results."""
