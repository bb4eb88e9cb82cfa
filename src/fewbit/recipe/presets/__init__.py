"""The named recipes: plain ones, MaxText's, Transformer Engine's."""

from . import plain as plain
from . import transformer_engine as transformer_engine
from .maxtext import maxtext_recipe as maxtext_recipe
from .mixed_precision import maxtext_mixed_precision as maxtext_mixed_precision
