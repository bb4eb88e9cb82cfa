"""How byte-level BPE tokenizers split text, by llama.cpp's names."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"


SPLITS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}{_REST}",): "dbrx",
    (f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{_REST}",): "qwen2",
    (f"{_cased('')}|\\p{{N}}{_REST_SLASH}",): "tekken",
    (f"{_cased(_CONTRACTIONS + '?')}|\\p{{N}}{{1,3}}{_REST_SLASH}",): "gpt-4o",
}
"""llama.cpp's name of each rule of splitting: the regular expressions in order; GPT-2's own is "bytes"."""
