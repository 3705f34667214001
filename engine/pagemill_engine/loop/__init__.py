"""The step: schedule -> run -> update, in the engine process. Plain loop now; the overlapped one stands beside it."""
