"""What engines and gateways report: state, load, step times."""
