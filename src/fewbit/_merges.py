"""Merges of byte-pair encodings."""

from collections.abc import Mapping, Sequence

from .errors import QuantError


def checked_merge(pair: Sequence[str], vocab: Mapping[str, int], where: str) -> tuple[str, str]:
    """The two tokens of a merge. They and their concatenation must be in the vocabulary."""
    if len(pair) != 2:
        raise QuantError(f"{where} is {' '.join(pair)!r:.80}; two tokens with a space between them are expected")
    left, right = pair
    if missing := [token for token in (left, right, left + right) if token not in vocab]:
        raise QuantError(f"{where} is {left + ' ' + right!r:.80}, but {missing[0]!r:.80} is not in the vocabulary")
    return left, right


def merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges of a BPE of SentencePiece. They are the pairs of tokens whose concatenation is a token.

    Args:
        scores: the score of each token.

    Returns:
        The pairs, the highest score of the concatenation first; of equal scores the first token, and then the longest left part.

    Raises:
        QuantError: when the merges are many times longer than the tokens.

    >>> merges_by_score({"a": -3.0, "b": -3.0, "ab": -2.0, "bab": -1.0})
    [('b', 'ab'), ('a', 'b')]
    """
    lengths = {len(token) for token in scores}
    room = _MOST_MERGES * sum(map(len, scores))
    merges = []
    for token in sorted(scores, key=lambda token: -scores[token]):
        length, before = len(token), len(merges)
        for n in range(length - 1, 0, -1):
            # Lengths first: a token of a million characters is not cut a million times.
            if n in lengths and length - n in lengths and token[:n] in scores and token[n:] in scores:
                merges.append((token[:n], token[n:]))
        room -= length * (len(merges) - before)
        if room < 0:
            raise QuantError(
                f"the tokens have merges of more than {_MOST_MERGES} times their own length; the vocabulary is damaged"
            )
    return merges


_MOST_MERGES = 32
"""The most characters of merges for each character of the tokens: twice those of SentencePiece's pieces, of 16 characters."""
