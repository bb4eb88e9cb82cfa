"""Quantized arrays: QArray, schemes, packing, scales, sharding."""

from . import schemes as schemes
from .hessian import hessian_blocks as hessian_blocks
from .hessian import quantize_with_hessian as quantize_with_hessian
from .masks import magnitude_mask as magnitude_mask
from .masks import nm_mask as nm_mask
from .packing import Packing as Packing
from .packing import pack as pack
from .packing import paired as paired
from .packing import unpack as unpack
from .qarray import PRODUCTS as PRODUCTS
from .qarray import QArray as QArray
from .qarray import is_qarray as is_qarray
from .scheme import SCHEMES as SCHEMES
from .scheme import Scheme as Scheme
from .scheme import scheme as scheme
from .sharding import shardings_of as shardings_of
from .sharding import specs_of as specs_of
from .validity import misfit as misfit
from .validity import refuse_invalid as refuse_invalid
