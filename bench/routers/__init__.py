"""The parts of the benchmarks that compare our gateway with other routers in front of the same pods.

`catalogue` lists the routers and how each one is installed and started. For the cost of forwarding
(`bench/gateway_overhead.py`, `bench/gateway_streams.py`), `pods` (`pod`, `answers`) are many upstreams in one process,
and `generator` with `prompts` is the load in another; both are as cheap as Python allows and share one core, and the
router has its own. `stage` starts them, `ladder` measures, `table` formats. For the choice of pods
(`bench/gateway_routing.py`), `engines` are real ones on a simulated device, and `chats` is the traffic.
"""
