"""Chat templates: as plain programs where possible, by jinja2 in a sandbox otherwise."""
