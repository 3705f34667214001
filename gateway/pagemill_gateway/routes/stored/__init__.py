"""The routes of `/v1/responses` and `/v1/conversations` of a gateway that stores them."""
