"""The native CPU path: C++ sources, compiled by the package's build, called through `library`.

The packages of the operations contain the launchers (`native.py`). Arithmetic is float32; weights may stay in 4 or 8
bits.
"""
