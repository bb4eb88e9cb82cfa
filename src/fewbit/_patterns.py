"""Regular expressions of recipes, matched in bounded time.

The syntax is that of Python's `re`, which can take exponential time. It matches expressions with few and no nested repeats,
in at most quadratic time; all others go to the package `regex`, with a time limit.
"""

import functools
import re

import regex

from .errors import QuantError

MAX_LENGTH = 10_000
"""The longest expression."""
SECONDS = 0.5
"""How long one match may take; ordinary ones take microseconds."""

_SPECIAL = set("\\.^$*+?{}[]|()")
_MAX_REPEATS, _MAX_CHOICES, _MAX_TEXT = 2, 8, 1000  # `re` then takes at most MAX_TEXT**2 / 2 * 2**MAX_CHOICES steps
_NESTED = re.compile(r"\)[*+{]")
# In `re` a brace that opens no repeat is a literal; in `regex` it may ask for approximate matching.
_LITERAL_BRACE = re.compile(r"(\\.)|\{(?!(?:\d+(?:,\d*)?|,\d*)\})", re.DOTALL)
# Expressions of literals and wildcards only are valid, so they are compiled when first needed: recipes may have 100,000 of them.
_LITERALS, _WILDCARD = r"(?:[\w/ :,-]|\\[^\w\s])+", r"(?:\.|\\[dw]|\[0-9\])[*+]?"
_SIMPLE = re.compile(f"(?:{_LITERALS}|{_WILDCARD})*+")
_PIECE = re.compile(f"({_LITERALS})|{_WILDCARD}")


class Pattern:
    """A regular expression for `fullmatch`.

    Args:
        text: the expression.
        what: what it is, for error messages: "rule path".

    Attributes:
        literal: the one text that it matches, if it has no wildcard; else None.
        prefix: every text that it matches starts with it.

    Raises:
        QuantError: for an invalid expression.

    >>> pattern = Pattern("layers/[0-9]+/.*", "rule path")
    >>> pattern.fullmatch("layers/3/mlp"), pattern.prefix
    (True, 'layers/')
    """

    def __init__(self, text: str, what: str):
        self.text, self.what = text, what
        self.literal, self.prefix, self._within = None, "", ""
        if not _SPECIAL.intersection(text):
            self.literal = self.prefix = text
            return
        if len(text) > MAX_LENGTH:
            raise QuantError(f"{what} has {len(text):,} characters; at most {MAX_LENGTH:,} are read")
        if _SIMPLE.fullmatch(text) is None:
            self._compiled  # noqa: B018 - refuses what is no regular expression
            return
        pieces = [re.sub(r"\\(.)", r"\1", found[1] or "") for found in _PIECE.finditer(text)]
        if all(pieces):
            self.literal = "".join(pieces)
        self.prefix, self._within = pieces[0], max(pieces, key=len)

    def fullmatch(self, name: str) -> bool:
        """Whether the expression matches the whole text. QuantError when that takes longer than `SECONDS`."""
        if self.literal is not None:
            return name == self.literal
        if self._within not in name:
            return False
        if len(name) <= _MAX_TEXT and self._is_quick:
            return self._compiled.fullmatch(name) is not None
        try:
            return self._limited.fullmatch(name, timeout=SECONDS) is not None
        except TimeoutError:
            raise QuantError(
                f"{self.what} {self.text!r:.200} takes longer than {SECONDS} s to compare with {name!r:.200}: its repeats are "
                "nested or overlap, as in (a+)+; write it without"
            ) from None

    @functools.cached_property
    def _compiled(self) -> re.Pattern[str]:
        if "[[:" in self.text:
            raise QuantError(f"{self.what} {self.text!r:.200} has a POSIX class; write the characters out, as in [A-Za-z]")
        try:
            return re.compile(self.text)
        except (re.error, OverflowError, RecursionError) as error:
            raise QuantError(f"{self.what} {self.text!r:.200} is not a regular expression: {error}") from error

    @functools.cached_property
    def _is_quick(self) -> bool:
        """Whether `re` takes at most quadratic time: few repeats, none of a group."""
        count = self.text.count
        repeats = count("*") + count("+") + count("{")
        is_flat = repeats == 0 or not _NESTED.search(self.text)
        return is_flat and repeats <= _MAX_REPEATS and count("?") + count("|") <= _MAX_CHOICES

    @functools.cached_property
    def _limited(self) -> regex.Pattern[str]:
        text = _LITERAL_BRACE.sub(lambda found: found[1] or r"\{", self.text)
        try:
            return regex.compile(text)
        except (regex.error, OverflowError, RecursionError) as error:
            raise QuantError(f"{self.what} {self.text!r:.200} is not a regular expression: {error}") from error
