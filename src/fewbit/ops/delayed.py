"""Delayed scaling as a policy asks for it: how long a history is, and how much room it leaves."""

import dataclasses
from typing import Any, Self

from .._json import checked, form_of
from ..array import Scheme
from ..array.scales import AbsMax
from ..errors import QuantError


@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """Scales that come from the largest magnitudes of the steps before: one state for each operand and for the gradient.

    It is a wish and holds no state: `fewbit.training.DelayedScale` is the state, and the training transform carries it. The
    gradient's magnitudes are those of the gradient as it comes in, before any scale is folded into it.

    Attributes:
        length: how many steps a history holds.
        margin: a scale is `2**margin` times wider than its history asks for.

    Reference: NVIDIA Transformer Engine, DelayedScaling; flax.linen.fp8_ops.

    >>> DelayedScaling(length=16).to_json()
    {'length': 16, 'margin': 0}
    """

    length: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise QuantError(f"delayed scaling: length is {self.length}, must be at least 1 step")

    def check(self, what: str, scheme: Scheme | None) -> None:
        """Refuses a scheme whose scale cannot come from a history: it must be one float32 number a tensor, by absmax."""
        if scheme is None:
            return
        has_one_scale = not scheme.tile and scheme.scale == "float32" and not scheme.tensor_scale
        if not has_one_scale or scheme.zero_point is not None or scheme.calibration != AbsMax():
            raise QuantError(
                f"delayed scaling needs one float32 scale a tensor, by absmax and without zero point; {what} is {scheme.name}. "
                "Take a scheme such as fp8_tensor"
            )

    def to_json(self) -> dict[str, Any]:
        """The JSON form: both fields."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, form: Any) -> Self:
        """What a JSON form asks for; an unknown key raises QuantError with the near name."""
        if isinstance(form, cls):
            return form
        return cls(**checked(form, DELAYED, "delayed scaling"))


DELAYED = form_of(DelayedScaling)
"""The JSON schema of delayed scaling."""
