"""The load stream as the operator hears it: `reader` follows a gateway, `book` keeps what they say, `held` compares."""
