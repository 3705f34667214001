"""Bodies and answers of TGI's API; `pagemill_protocol.dialects.tgi` is the dialect."""
