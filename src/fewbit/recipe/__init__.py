"""Recipes: rules that choose parameters and policies; plans for one model."""

from . import presets as presets
from .apply import check_storable as check_storable
from .apply import quantize_params as quantize_params
from .plan import Plan as Plan
from .plan import plan as plan
from .presets import maxtext_mixed_precision as maxtext_mixed_precision
from .presets import maxtext_recipe as maxtext_recipe
from .quantize_row import quantize_row as quantize_row
from .recipe import RECIPES as RECIPES
from .recipe import Recipe as Recipe
from .recipe import recipe as recipe
from .recipe import weight_only as weight_only
from .role import Role as Role
from .roles import TensorRole as TensorRole
from .rows import PlanRow as PlanRow
from .rows import ProductRow as ProductRow
from .rule import Rule as Rule
from .sparsity import Sparsity as Sparsity
from .sparsity import SparsityState as SparsityState
