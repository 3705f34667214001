"""What every process sets up for itself: logs, settings files, limits of the machine, the heap."""
