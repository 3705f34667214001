"""Bodies and answers of KServe's inference protocol; `pagemill_api.dialects.open_inference.kserve` makes dialects of them."""
