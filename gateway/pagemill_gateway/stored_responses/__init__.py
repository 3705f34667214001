"""Answers of `/v1/responses` that the gateway keeps, so that a later request can go on from them."""
