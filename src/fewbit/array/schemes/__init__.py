"""The named schemes, registered on import."""

from . import block as block
from . import gguf as gguf
from . import integer as integer
from . import mx as mx
from . import serving as serving
