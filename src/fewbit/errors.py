"""The two exceptions of fewbit: QuantError and UnsupportedError."""

from collections.abc import Mapping


class QuantError(ValueError):
    """An error that the caller can fix. The message names the argument, what arrived, what was expected, what to do."""


class UnsupportedError(NotImplementedError):
    """Something that fewbit cannot do, with the reason of every alternative tried.

    Args:
        message: one sentence that says what was asked.
        reasons: for each alternative (a backend, a rule), why it does not apply.

    >>> print(UnsupportedError("qmatmul cannot run k=100", {"triton": "k must be a multiple of 64"}))
    qmatmul cannot run k=100:
      triton: k must be a multiple of 64
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None):
        self.reasons = dict(reasons or {})
        if self.reasons:
            message = "\n".join([message + ":", *(f"  {name}: {reason}" for name, reason in self.reasons.items())])
        super().__init__(message)
