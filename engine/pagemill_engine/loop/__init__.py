"""The engine process and its loop of steps: schedule, run, update. The loop is plain or overlapped."""
