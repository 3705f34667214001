"""The step: schedule -> run -> update, in the engine process. Plain or overlapped."""
