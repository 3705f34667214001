"""What the leading operator does alone: holds the lease, queues resources, reconciles them."""
