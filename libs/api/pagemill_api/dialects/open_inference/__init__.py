"""Bodies and answers of KServe's inference protocol; `kserve` makes dialects of them."""
