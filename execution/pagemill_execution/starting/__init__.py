"""From settings and files to a runner that can execute steps: load, compile, measure memory."""
