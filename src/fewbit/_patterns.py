"""Regular expressions of recipes, matched in bounded time.

The syntax is that of Python's `re`, which can take exponential time. It matches expressions with few and no nested repeats,
in at most quadratic time; all others go to the package `regex`, with a time limit.
"""

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


class Pattern:
    """A regular expression for `fullmatch`.

    Args:
        text: the expression.
        what: what it is, for error messages: "rule path".

    Raises:
        QuantError: for an invalid expression.

    >>> Pattern("layers/[0-9]+/.*", "rule path").fullmatch("layers/3/mlp")
    True
    """

    def __init__(self, text: str, what: str):
        self.text, self.what = text, what
        self._plain: re.Pattern[str] | None = None
        self._limited: regex.Pattern[str] | None = None
        if not _SPECIAL.intersection(text):
            return
        if len(text) > MAX_LENGTH:
            raise QuantError(f"{what} has {len(text):,} characters; at most {MAX_LENGTH:,} are read")
        if "[[:" in text:
            raise QuantError(f"{what} {text!r:.200} has a POSIX class; write the characters out, as in [A-Za-z]")
        try:
            self._plain = re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise QuantError(f"{what} {text!r:.200} is not a regular expression: {error}") from error

    def fullmatch(self, name: str) -> bool:
        """Whether the expression matches the whole text. QuantError when that takes longer than `SECONDS`."""
        if self._plain is None:
            return name == self.text
        if len(name) <= _MAX_TEXT and self._is_quick:
            return self._plain.fullmatch(name) is not None
        if self._limited is None:
            self._limited = self._with_limit()
        try:
            return self._limited.fullmatch(name, timeout=SECONDS) is not None
        except TimeoutError:
            raise QuantError(
                f"{self.what} {self.text!r:.200} takes longer than {SECONDS} s to compare with {name!r:.200}: its repeats are "
                "nested or overlap, as in (a+)+; write it without"
            ) from None

    @property
    def _is_quick(self) -> bool:
        """Whether `re` takes at most quadratic time: few repeats, none of a group."""
        count = self.text.count
        repeats = count("*") + count("+") + count("{")
        is_flat = repeats == 0 or not _NESTED.search(self.text)
        return is_flat and repeats <= _MAX_REPEATS and count("?") + count("|") <= _MAX_CHOICES

    def _with_limit(self) -> regex.Pattern[str]:
        text = _LITERAL_BRACE.sub(lambda found: found[1] or r"\{", self.text)
        try:
            return regex.compile(text)
        except (regex.error, OverflowError, RecursionError) as error:
            raise QuantError(f"{self.what} {self.text!r:.200} is not a regular expression: {error}") from error
