"""Merges of byte-pair encodings."""

from collections.abc import Mapping, Sequence

from ...errors import QuantError


def checked_merge(pair: Sequence[str], vocab: Mapping[str, int], where: str) -> tuple[str, str]:
    """The two tokens of a merge; they and their concatenation must be in the vocabulary."""
    if len(pair) != 2:
        raise QuantError(f"{where} is {' '.join(pair)!r:.80}; two tokens with a space between them are expected")
    left, right = pair
    if missing := [token for token in (left, right, left + right) if token not in vocab]:
        raise QuantError(f"{where} is {left + ' ' + right!r:.80}, but {missing[0]!r:.80} is not in the vocabulary")
    return left, right
