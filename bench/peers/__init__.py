"""Engines made for CPUs, measured beside Pagemill on the same work; `bench/side_by_side.py` is the command.

Each peer has a file that defines how it is installed and started; `catalogue` lists them. An engine runs in a process
and an interpreter of its own and is either a worker (`wire`: JSON lines over stdin and stdout) or an HTTP server
(`http_load`). `rows` defines the work, `session` measures it, `table` compares.
"""
