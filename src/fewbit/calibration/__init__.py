"""Calibration: activation ranges, channel amax, second moments, and static-range recipes."""

from .measure import Observation as Observation
from .measure import ProductObservation as ProductObservation
from .observe import observe as observe
from .range_rules import AbsMaxRange as AbsMaxRange
from .range_rules import EMARange as EMARange
from .range_rules import MeanRange as MeanRange
from .range_rules import MinMaxRange as MinMaxRange
from .range_rules import PercentileRange as PercentileRange
from .ranges import AbstractRange as AbstractRange
from .ranges import RangeState as RangeState
from .stats import Stats as Stats
