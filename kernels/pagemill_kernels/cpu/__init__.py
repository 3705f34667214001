"""The native CPU path: C++ sources, compiled by the package's build, called through `library`.

The operations' own folders hold the launchers (`native.py`). Float32 arithmetic; weights may stay in 4 or 8 bits.
"""
