"""OpenTelemetry traces of requests, made once a request is over."""
