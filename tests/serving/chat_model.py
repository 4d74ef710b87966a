"""A tokenizer and a chat template for the tiny model, so that a server takes chats without a download."""

from __future__ import annotations

import json
from pathlib import Path

from kvledger.audit.demo.model import VOCABULARY_TOKENS

SPECIAL = ("<s>", "</s>", "<unk>")
ROLES = ("system", "user", "assistant", "tool")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} "
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {% endfor %}{% endfor %}assistant"
)
"""A later turn of a chat begins with the text of the turn before."""


def word(token: int) -> str:
    """The text of a token."""
    return (*SPECIAL, *ROLES)[token] if token < len(SPECIAL + ROLES) else f"w{token}"


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer into a model's folder; each token is one word."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": content} | special for token, content in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word(token): token for token in range(VOCABULARY_TOKENS)},
            "unk_token": "<unk>",
        },
    }
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
