"""What follows from failures: which endpoints are ejected, which requests may retry, and which request is the cause."""
