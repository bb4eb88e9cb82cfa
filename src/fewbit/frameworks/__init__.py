"""Adapters for plain trees, Equinox, Flax Linen and Flax NNX."""

from . import linen as linen
from . import nnx as nnx
from . import serialization as serialization
from . import tree as tree
