"""Number formats: integers, minifloats, codebooks, ternary, binary, E8M0."""

from .codebook import Codebook as Codebook
from .codebook import bnb_fp4 as bnb_fp4
from .codebook import dynamic8 as dynamic8
from .codebook import iq4_nl as iq4_nl
from .codebook import nf4 as nf4
from .e8m0 import E8M0 as E8M0
from .e8m0 import e8m0 as e8m0
from .format import FORMATS as FORMATS
from .format import AbstractFormat as AbstractFormat
from .integer import Integer as Integer
from .minifloat import Minifloat as Minifloat
from .serial import format_from_json as format_from_json
from .serial import format_to_json as format_to_json
from .ternary import Binary as Binary
from .ternary import Ternary as Ternary
