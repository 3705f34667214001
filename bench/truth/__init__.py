"""The parts of `simulator_truth.py`: the real engine behind a real gateway, the load, and the arithmetic of errors."""
