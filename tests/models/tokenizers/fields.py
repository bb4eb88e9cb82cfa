"""GGUF metadata of small tokenizers."""

from typing import Any

from fewbit.models import Tokenizer

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
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


SPACE = "\u2581"
WORDS = (
    "the theme then hen he them there here other mother moth both bath bathe that at heat eat tea team meat 12 121 \n \n\n"
)


def sentencepiece_fields(*, adds_space: bool = True) -> dict[str, Any]:
    """The parts of `WORDS` by length and frequency, bytes, and tokens of every kind."""
    counts: dict[str, int] = {}
    for word in WORDS.split(" "):
        word = SPACE + word
        for start in range(len(word)):
            for end in range(start + 1, len(word) + 1):
                counts[word[start:end]] = counts.get(word[start:end], 0) + 1
    normal = sorted((part for part in counts if len(part) == 1 or counts[part] > 1), key=lambda p: (len(p), -counts[p], p))
    special = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<tool>", 4), ("  ", 4), ("    ", 4), ("<|end|>", 3)]
    tokens = [*special, *((f"<0x{byte:02X}>", 6) for byte in range(256)), *((part, 1) for part in normal), ("[PAD]", 5)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.scores": [-float(i) if kind == 1 else -1000.0 for i, (_, kind) in enumerate(tokens)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": adds_space,
    }


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(int(i)) for i in tokenizer.encode(text)]


def sentencepiece_source(*, adds_space: bool = True) -> Any:
    """The same tokenizer as Hugging Face has it, with a list of merges: of Llama with a space before the text, else of Gemma."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    fields = sentencepiece_fields()
    tokens = [t.replace(" ", SPACE) for t in fields["tokenizer.ggml.tokens"] if t != "[PAD]"]
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(whole[:n], whole[n:]) for whole in tokens for n in range(len(whole) - 1, 0, -1)]
    merges = [(left, right) for left, right in pairs if left in vocab and right in vocab]
    source = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend(SPACE)] if adds_space else []
    source.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if not adds_space:
        source.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    stripped = [decoders.Strip(" ", 1, 0)] if adds_space else []
    source.decoder = decoders.Sequence(
        [decoders.Replace(Regex(SPACE), " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    kinds = dict(zip(tokens, fields["tokenizer.ggml.token_type"], strict=False))
    spaces = [t for t in tokens if kinds[t] == 4 and SPACE in t]  # added tokens of Gemma, pieces of Llama
    added = [t for t in tokens if kinds[t] == 4 and not (adds_space and t in spaces)]
    source.add_tokens([AddedToken(t, normalized=False) for t in added])
    source.add_special_tokens([AddedToken(t, normalized=False) for t in tokens if kinds[t] in (2, 3)])
    source.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return source
