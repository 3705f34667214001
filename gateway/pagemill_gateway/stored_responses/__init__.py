"""Stores responses of `/v1/responses`, so that later requests can continue them."""
