"""The routes of the engine's two ports, and the link of gateways beside them."""
