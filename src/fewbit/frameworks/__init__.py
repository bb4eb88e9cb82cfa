"""Models of other libraries: plain trees and Equinox modules, Flax Linen, Flax NNX; each imports its library when it is used."""

from . import linen as linen
from . import nnx as nnx
from . import serialization as serialization
from . import tree as tree
