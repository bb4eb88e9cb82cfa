"""GGUF metadata of small tokenizers."""

from typing import Any

from fewbit.models import Tokenizer

CHATML = (
    "{% if not system %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
)


def gguf_fields(pre: str = "smollm") -> dict[str, Any]:
    """Bytes as tokens, merges of `he`, `ll` and of two digits, and two special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    specials = ["<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "1 2", "Ġ h"]
    tokens = [*specials, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHATML,
    }


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(int(i)) for i in tokenizer.encode(text)]
