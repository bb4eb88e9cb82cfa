"""Calibrations: rules for choosing scales, such as `"absmax,0.9"`."""

from .absmax import AbsMax as AbsMax
from .calibration import CALIBRATIONS as CALIBRATIONS
from .calibration import AbstractCalibration as AbstractCalibration
from .calibration import Target as Target
from .calibration import Tiles as Tiles
from .calibration import parse_calibration as parse_calibration
from .centred import CentredAbsMax as CentredAbsMax
from .fixed import Fixed as Fixed
from .lloyd import learned_codebook as learned_codebook
from .minmax import MinMax as MinMax
from .moments import RMS as RMS
from .moments import AbsMean as AbsMean
from .mx import MX as MX
from .nvfp4 import NVFP4 as NVFP4
from .percentile import Percentile as Percentile
from .search.exact import Exact as Exact
from .search.mse import MSE as MSE
from .search.mse import SNR as SNR
from .search.tensor_scale import best_tensor_scale as best_tensor_scale
from .signed_max import SignedMax as SignedMax
from .store import ScaleStore as ScaleStore
from .unsaturated import unsaturated as unsaturated
