"""Virtual clock around the real scheduler and block manager."""
