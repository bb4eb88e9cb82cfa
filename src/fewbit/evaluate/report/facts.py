"""What a report says about quantized models, as plain facts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..perplexity import Comparison

WORST = 5
"""The number of weights of lowest SQNR whose histograms a page shows without a choice."""


@dataclasses.dataclass(frozen=True)
class TensorFacts:
    """One tensor of a quantized model and of its source.

    Attributes:
        path: the parameter's path.
        kind: the path with a star for each number, as in `layers/*/attn/q`.
        layer: the first number of the path; None if it has none.
        shape: its shape.
        stored: how the model stores it: a scheme or a dtype.
        is_quantized: whether the model stores it in fewer bits than its dtype has.
        role: what it does in the model, by `fewbit.recipe.Role`.
        reason: why it is stored so, if that is known; else empty.
        bytes_before: its bytes in the source; None if that lacks it.
        bytes_after: its bytes in the model.
        sqnr_db: its SQNR against the source, infinite if it is equal; None: not measured.
    """

    path: str
    kind: str
    layer: int | None
    shape: tuple[int, ...]
    stored: str
    is_quantized: bool
    role: str
    reason: str
    bytes_before: int | None
    bytes_after: int
    sqnr_db: float | None

    @property
    def bits_per_weight(self) -> float:
        """`8 * bytes_after` over the number of elements."""
        return 8 * self.bytes_after / max(math.prod(self.shape), 1)

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {**vars(self), "bits_per_weight": self.bits_per_weight}


@dataclasses.dataclass(frozen=True)
class Histogram:
    """The histogram of a float weight in units of its blocks' scales.

    Attributes:
        path: the parameter's path.
        stored: its scheme.
        format: the format of its codes.
        sqnr_db: its SQNR, infinite if it is equal to the source's.
        amax: the largest magnitude of the float weight.
        low: the left edge of the first bin.
        high: the right edge of the last bin.
        counts: the number of elements of each bin, all of one width; those outside are in the outermost bins.
        numbers: the finite numbers of the format, ascending.
        clipped: the fraction of elements that lie more than half a step beyond the outermost numbers.
    """

    path: str
    stored: str
    format: str
    sqnr_db: float
    amax: float
    low: float
    high: float
    counts: tuple[int, ...]
    numbers: tuple[float, ...]
    clipped: float


@dataclasses.dataclass(frozen=True)
class MeasuredQuality:
    """A model compared with the source on a text.

    Attributes:
        text: the name of the text.
        window: the tokens of a window.
        engine: the program that ran both models.
        comparison: both perplexities, KL divergence and top-1 agreement.
    """

    text: str
    window: int
    engine: str
    comparison: Comparison


@dataclasses.dataclass(frozen=True)
class InputFacts:
    """The inputs of one product of the source, or of several with the same inputs.

    Attributes:
        path: the path of its weight; those of experts as one, `layers/3/mlp/experts/down`.
        layer: the number of its layer.
        channels: the number of channels, its contraction.
        amax: the largest magnitude.
        rms: the root mean square of all elements.
        channel: the channel of the largest magnitude.
        channel_ratio: the largest RMS of a channel over that of the median channel.
    """

    path: str
    layer: int
    channels: int
    amax: float
    rms: float
    channel: int
    channel_ratio: float

    @property
    def peak(self) -> float:
        """`amax / rms`, large where few channels or tokens stand out. It is 4 to 5 for normal numbers."""
        return self.amax / self.rms if self.rms > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {**vars(self), "peak": self.peak}


@dataclasses.dataclass(frozen=True)
class MeasuredInputs:
    """What the products of the source read on a text.

    Attributes:
        text: the name of the text.
        tokens: the number of tokens.
        products: the inputs of each product, in the order of the layers.
        expert_tokens: the tokens routed to each expert, by the path of a layer's experts.
    """

    text: str
    tokens: int
    products: tuple[InputFacts, ...]
    expert_tokens: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class CalibratedExperts:
    """The tokens from which a method learned about each expert of a mixture.

    Attributes:
        text: the name of the calibration text.
        tokens: the number of its tokens.
        unseen: what happened to experts without any, the option `--unseen-experts`.
        counts: the tokens routed to each expert, by the path of a layer's experts.
    """

    text: str
    tokens: int
    unseen: str
    counts: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """A model on the disk, or one that was quantized in memory.

    Attributes:
        name: the last component of its path.
        path: its path.
        container: the layout of its files.
        size: the number of elements of all parameters.
        file_bytes: the bytes of its file, or of all files of its directory; None for a model in memory.
        array_bytes: the bytes of its parameters.
    """

    name: str
    path: str
    container: str
    size: int
    file_bytes: int | None
    array_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """`8 * array_bytes / size`."""
        return 8 * self.array_bytes / max(self.size, 1)

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {**vars(self), "bits_per_weight": self.bits_per_weight}


@dataclasses.dataclass(frozen=True)
class LeftInFloat:
    """Tensors of one role that were left in float for one reason.

    Attributes:
        role: their role.
        reason: the reason.
        count: how many they are.
        nbytes: their bytes in the model.
        example: the path of the first.
    """

    role: str
    reason: str
    count: int
    nbytes: int
    example: str


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A quantized model, compared with its source.

    Attributes:
        stored: its path and its bytes.
        source: the source that its manifest names; empty if none does.
        recipe: the recipe that its manifest names; empty if none does.
        method: the method that its manifest names, rtn by default; empty without a recipe.
        quality: its quality; None if it was not measured.
        why_no_quality: why it was not measured; empty if it was.
        tensors: its tensors.
        histograms: of each quantized weight whose SQNR was measured, in the order of `tensors`.
        notes: sentences for the reader.
        experts: what its method knew of each expert; None if it learned nothing, or its manifest does not say.
    """

    stored: StoredModel
    source: str
    recipe: str
    method: str
    quality: MeasuredQuality | None
    why_no_quality: str
    tensors: tuple[TensorFacts, ...]
    histograms: tuple[Histogram, ...]
    notes: tuple[str, ...]
    experts: CalibratedExperts | None = None

    @property
    def worst(self) -> tuple[Histogram, ...]:
        """The histograms of the `WORST` weights of lowest SQNR, the lowest first. Weights of no finite SQNR are left out."""
        lossy = [histogram for histogram in self.histograms if math.isfinite(histogram.sqnr_db)]
        return tuple(sorted(lossy, key=lambda histogram: histogram.sqnr_db)[:WORST])

    @property
    def left_in_float(self) -> tuple[LeftInFloat, ...]:
        """The tensors that are not quantized, by role and reason. Those of most bytes come first."""
        groups: dict[tuple[str, str], list[TensorFacts]] = {}
        for tensor in self.tensors:
            if not tensor.is_quantized:
                groups.setdefault((tensor.role, tensor.reason or "not recorded"), []).append(tensor)
        found = [
            LeftInFloat(*key, len(group), sum(t.bytes_after for t in group), group[0].path) for key, group in groups.items()
        ]
        return tuple(sorted(found, key=lambda group: -group.nbytes))

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {**vars(self), "left_in_float": self.left_in_float}


@dataclasses.dataclass(frozen=True)
class Report:
    """Quantized models of one source.

    Attributes:
        source: the model that the others were quantized from.
        models: the quantized models.
        inputs: what the source's products read; None if it was not measured.
        why_no_inputs: why it was not measured; empty if it was.
    """

    source: StoredModel
    models: tuple[ModelFacts, ...]
    inputs: MeasuredInputs | None = None
    why_no_inputs: str = ""
