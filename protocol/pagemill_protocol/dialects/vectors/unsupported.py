"""Fields of embedding APIs that are not supported: refused by name, as in `openai.unsupported`."""

from __future__ import annotations

from collections.abc import Mapping

from pagemill_protocol.openai.unsupported import Unsupported

COMMON: Mapping[str, Unsupported] = {
    "messages": Unsupported("Send the text itself."),
    "stream": Unsupported("Vectors and scores are not streamed; remove it.", (False,)),
    "normalize": Unsupported("The model's files say whether its vectors are normalized; remove it."),
    "embedding_types": Unsupported("Send `encoding_format`.", (["float"],)),
    "output_dtype": Unsupported("Vectors are float32; remove it.", ("float",)),
    "rank_fields": Unsupported("Send each document as one text.", ([],)),
    "max_chunks_per_doc": Unsupported("Documents are not split; send `truncate_prompt_tokens` to cut them."),
}
