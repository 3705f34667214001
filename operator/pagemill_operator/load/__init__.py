"""The load stream in the operator: `stream` follows one gateway, `store` keeps the reports of all gateways,
`decisions` publishes scaling decisions to gateways."""
