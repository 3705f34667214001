"""JSON schemas written with the keywords that llguidance compiles. Pure."""
