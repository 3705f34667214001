"""Our gateway beside other routers, in front of the same pods.

`catalogue` lists the routers with how each is installed and started. What forwarding costs
(`bench/gateway_overhead.py`, `bench/gateway_streams.py`): `pods` (`pod`, `answers`) are the upstreams, many in one
process, `generator` is the load with `prompts`, in another; both are as cheap as Python allows and share one core, the
router has its own. `stage` starts them, `ladder` measures, `table` shows. Which pod is chosen
(`bench/gateway_routing.py`): `engines` are real ones on a simulated device, `chats` the traffic.
"""
