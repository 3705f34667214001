"""The load stream in the operator: `stream` follows one gateway, `store` keeps what all of them report."""
