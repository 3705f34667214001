"""Our gateway beside other routers, in front of the same simulated pods; `bench/gateway_overhead.py` is the command.

`catalogue` lists the routers with how each is installed and started. `pods` are the upstreams, many in one process,
`generator` is the load, in another; both are as cheap as Python allows and share one core, the router has its own.
`ladder` measures, `results` and `table` keep and show.
"""
