"""Bodies and answers of KServe's inference protocol; `pagemill_protocol.dialects.kserve` makes dialects of them."""
