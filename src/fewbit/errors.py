"""The two errors of fewbit: what the caller can fix, and what the library lacks."""

from collections.abc import Mapping


class QuantError(ValueError):
    """Something the caller can fix: the message names the argument, what came, what was expected and what to do."""


class UnsupportedError(NotImplementedError):
    """Something fewbit cannot do, with every reason that was found on the way.

    Args:
        message: one sentence that says what was asked.
        reasons: for each way that was tried (a backend, a rule), why it could not serve.

    >>> print(UnsupportedError("qmatmul cannot run k=100", {"triton": "k must be a multiple of 64"}))
    qmatmul cannot run k=100:
      triton: k must be a multiple of 64
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None):
        self.reasons = dict(reasons or {})
        lines = [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        super().__init__("\n".join([message + ":", *lines]) if lines else message)
