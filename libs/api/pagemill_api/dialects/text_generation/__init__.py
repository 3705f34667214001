"""Bodies and answers of TGI's API; `pagemill_api.dialects.text_generation.tgi` is the dialect."""
