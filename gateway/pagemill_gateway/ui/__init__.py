"""The page `/ui`: what it shows of the fleet, and its static files."""
