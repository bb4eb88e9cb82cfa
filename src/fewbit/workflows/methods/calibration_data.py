"""The text from which methods learn."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from ...errors import QuantError
from ...models.installed import calibration_text
from ..model import Model
from .experts import check_unseen

WINDOWS = 128
WINDOW = 256


@dataclasses.dataclass(frozen=True)
class CalibrationData:
    """The tokens from which a method learns.

    Attributes:
        text: the name of the text.
        windows: token ids `[windows, tokens]`.
        unseen_experts: what happens to experts to which none of them is routed, see `experts.UNSEEN`.
    """

    text: str
    windows: np.ndarray
    unseen_experts: str = "nearest"

    def __post_init__(self) -> None:
        if self.windows.ndim != 2 or not self.windows.size or not np.issubdtype(self.windows.dtype, np.integer):
            raise QuantError(
                f"the calibration windows are {self.windows.dtype.name}{self.windows.shape}, expected token ids [windows, tokens]"
            )

        check_unseen(self.unseen_experts)

    @property
    def facts(self) -> dict[str, Any]:
        """The provenance recorded in a directory."""
        digest = hashlib.sha256(np.ascontiguousarray(self.windows, np.int32).tobytes()).hexdigest()
        windows = list(self.windows.shape)
        return {"text": self.text, "windows": windows, "sha256": digest, "unseen_experts": self.unseen_experts}


def calibration_data(
    model: Model,
    text: str | None = None,
    *,
    windows: int = WINDOWS,
    window: int | None = None,
    unseen_experts: str | None = None,
) -> CalibrationData:
    """Cuts windows of tokens out of a text, spread evenly over it.

    Args:
        model: a model that can be run, with a tokenizer.
        text: as for `models.find_text`; None takes `models.calibration_text`, which the default evaluation does not read.
        windows: how many windows; fewer if the text is shorter.
        window: the tokens of a window; None takes 256, or the model's context if that is shorter.
        unseen_experts: as in `CalibrationData`; None takes "nearest".

    Returns:
        The windows, with the tokens that begin a text in front of each.

    Raises:
        QuantError: when the text is shorter than one window, a window longer than the model's context or no longer than the
            tokens that begin it, or there is a choice for experts and the model has none.
        UnsupportedError: when the model cannot be run, or has no tokenizer.
    """
    config, tokenizer, found = model.runnable_config(), model.readable_tokenizer(), calibration_text(text)
    if unseen_experts is not None and config.experts is None:
        raise QuantError(f"{model.name} has no experts; leave out --unseen-experts {unseen_experts}")
    if window is None:
        window = min(WINDOW, config.context)
    if not 0 < window <= config.context or windows < 1:
        raise QuantError(
            f"{windows} calibration windows of {window} tokens: there must be one or more, each of 1 to {config.context} tokens, "
            f"the context of {model.name}"
        )
    starts = len(tokenizer.start_ids)
    if window <= starts:
        raise QuantError(
            f"a calibration window has {window} tokens, and the tokenizer of {model.name} begins each with {starts}; take "
            f"{starts + 1} tokens or more"
        )
    ids = tokenizer.encode(found.content)
    count = len(ids) // window
    if count == 0:
        raise QuantError(f"the calibration text {found.name} has {len(ids)} tokens, and a window takes {window}")
    chosen = np.linspace(0, count - 1, min(windows, count)).astype(int)
    rows = ids[: count * window].reshape(count, window)[chosen]
    rows[:, :starts] = tokenizer.start_ids
    return CalibrationData(found.name, rows, unseen_experts or "nearest")
