"""The config: a frozen, typed tree that is checked whole before anything starts.

Must not know: torch, Ray, recipes; it can be checked without them.
"""

from rallypoint.config.fields import Problem, leaves, shown, values_of
from rallypoint.config.load import LoadedConfig, load_config
from rallypoint.config.recipes import RECIPES, RecipeSpec, RoleName, declare
from rallypoint.config.sections.frame import TrainerConfig
from rallypoint.config.sections.learning import OptimizerConfig
from rallypoint.config.sections.material import LoRAConfig, RewardConfig
from rallypoint.config.sections.sampling import RolloutConfig
from rallypoint.config.source import COMMAND_LINE, read, shipped_recipes
from rallypoint.config.tree import RunConfig

__all__ = [
    "COMMAND_LINE",
    "RECIPES",
    "LoRAConfig",
    "LoadedConfig",
    "OptimizerConfig",
    "Problem",
    "RecipeSpec",
    "RewardConfig",
    "RoleName",
    "RolloutConfig",
    "RunConfig",
    "TrainerConfig",
    "declare",
    "leaves",
    "load_config",
    "read",
    "shipped_recipes",
    "shown",
    "values_of",
]
