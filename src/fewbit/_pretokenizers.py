"""How byte-level BPE tokenizers split text, by llama.cpp's names."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_OF_LINE = r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_PHRASES = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_MARKED_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_MARKED_REST = r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_BY_POWERS = (
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    + "".join(rf"|\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cased(ending: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

SPLITS = {
    ("bytes",): "gpt-2",
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    ("digits", "bytes"): "smollm",
    (f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}{_REST}",): "dbrx",
    (f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}{_REST_BY_POWERS}",): "jais-2",
    (f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{_REST}",): "qwen2",
    (
        f"{_CONTRACTIONS}|{_PHRASES}|\\p{{N}}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]?|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
    ): "exaone-moe",
    (f"{_CONTRACTIONS}|{_MARKED_WORDS}|\\p{{N}}{_MARKED_REST}",): "qwen35",
    (f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1}}{_REST_OF_LINE}",): "seed-coder",
    (f"{_cased('')}|\\p{{N}}{_REST_SLASH}",): "tekken",
    (f"{_cased(_CONTRACTIONS + '?')}|\\p{{N}}{{1,3}}{_REST_SLASH}",): "gpt-4o",
    (r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK_WORDS): "deepseek-v3",
}
"""llama.cpp's name of each rule of splitting: the regular expressions in order, ends of lines escaped; GPT-2's own is "bytes"."""
