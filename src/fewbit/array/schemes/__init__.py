"""The named schemes, as data; importing this package registers them."""

from . import block as block
from . import gguf as gguf
from . import integer as integer
from . import mx as mx
