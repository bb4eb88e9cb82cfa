"""The configuration of delayed scaling: amax history length and margin."""

import dataclasses
from typing import Any, Self

from .._json import checked, form_of
from ..array.scales.absmax import AbsMax
from ..array.scheme import Scheme
from ..errors import QuantError


@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """Scales computed from the amax of earlier steps, for each operand and the gradient.

    Configuration only; the state is `fewbit.training.DelayedScale`, which the training transform carries. The gradient's amax
    is that of the incoming gradient, before any scale is folded into it.

    Attributes:
        length: the number of steps in the amax history.
        margin: scales are `2**margin` times larger than the history's amax requires.

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
        """Raises QuantError unless the scheme has one float32 scale per tensor, by absmax."""
        if scheme is None:
            return
        has_one_scale = not scheme.tile and scheme.scale == "float32" and not scheme.tensor_scale
        if not has_one_scale or scheme.zero_point is not None or scheme.calibration != AbsMax():
            raise QuantError(
                f"delayed scaling needs one float32 scale per tensor, by absmax and without zero point; {what} is {scheme.name}. "
                "Use a scheme such as fp8_tensor"
            )

    def to_json(self) -> dict[str, Any]:
        """The JSON form: both fields."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, form: object) -> Self:
        """The configuration of a JSON form. An unknown key raises QuantError with the nearest name."""
        if isinstance(form, cls):
            return form
        return cls(**checked(form, DELAYED, "delayed scaling"))


DELAYED = form_of(DelayedScaling)
"""The JSON schema of delayed scaling."""
