"""The routes of the page `/ui`."""
