"""Where models come from: one file for each scheme of a source; `sources.registry` lists them."""
