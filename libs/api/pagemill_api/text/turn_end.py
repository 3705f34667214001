"""Find the token with which a chat template ends the assistant's turns, for a model whose files do not declare it.

Such a model writes the token and goes on, usually with a message of the user. The check renders one short conversation.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pagemill_api.text.control_tokens import pattern_of
from pagemill_protocol.errors import PagemillError

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

logger = logging.getLogger("pagemill.model_files")
_ANSWER = "Rome."
_MESSAGES = [
    {"role": "user", "content": "What is the capital of Italy?"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": "Thanks."},
]
_CHANNELS = "<|channel|>"
"""Templates with channels end messages of which an answer has several."""


def undeclared_turn_end(tokenizer: Tokenizer) -> str | None:
    """Return the control token that follows the assistant's text and ends no answer, or None."""
    source = tokenizer.chat_template.source(has_tools=False)
    if not source or _CHANNELS in source:
        return None
    try:
        text = tokenizer.render_chat(_MESSAGES, add_generation_prompt=False)
    except PagemillError:  # a template for other conversations
        return None
    _, _, after = text.partition(_ANSWER)
    found = pattern_of(tokenizer.control_tokens.texts).match(after.lstrip())
    if found is None or tokenizer.encode(found[0], add_special_tokens=False)[-1] in tokenizer.eos_token_ids:
        return None
    return found[0]


def warn_of_turn_end(tokenizer: Tokenizer) -> None:
    """Log a warning about a turn's end that is no end token."""
    token = undeclared_turn_end(tokenizer)
    if token is None:
        return
    (token_id,) = tokenizer.encode(token, add_special_tokens=False)[-1:]
    logger.warning(
        "The chat template ends the assistant's turns with %s (token %d), which no file of the model declares as an "
        "end of answers: they go on after it. Add it to `eos_token_id` of generation_config.json, or as "
        "`tokenizer.ggml.eot_token_id` of a GGUF file; until then send `stop_token_ids: [%d]`.",
        token,
        token_id,
        token_id,
    )
