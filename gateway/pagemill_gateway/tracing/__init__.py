"""OpenTelemetry traces: what became of a request, told once it is over."""
