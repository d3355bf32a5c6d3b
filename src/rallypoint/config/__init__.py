"""The config: a frozen, typed tree that is checked whole before anything starts.

Must not know: torch, Ray, recipes; it can be checked without them.
"""

from rallypoint.config.fields import Problem, leaves, shown, values_of
from rallypoint.config.load import LoadedConfig, expected, load_config
from rallypoint.config.recipes import RECIPES, WATCHED, RecipeSpec, RoleName, declare
from rallypoint.config.sections.frame import CheckConfig, TrackingConfig, TrainerConfig
from rallypoint.config.sections.learning import (
    Activations,
    ActorConfig,
    CriticConfig,
    Offload,
    OptimizerConfig,
    ServedTeacherConfig,
)
from rallypoint.config.sections.material import (
    Architecture,
    CreateModelConfig,
    LoRAConfig,
    OnTooLong,
    RewardConfig,
    TokenizerConfig,
)
from rallypoint.config.sections.sampling import RolloutConfig
from rallypoint.config.source import COMMAND_LINE, describe, read, shipped_recipes, to_yaml
from rallypoint.config.tree import RunConfig, row_limit
from rallypoint.config.unread import unread_sections, why_unread

__all__ = [
    "COMMAND_LINE",
    "RECIPES",
    "WATCHED",
    "Activations",
    "ActorConfig",
    "Architecture",
    "CheckConfig",
    "CreateModelConfig",
    "CriticConfig",
    "LoRAConfig",
    "LoadedConfig",
    "Offload",
    "OnTooLong",
    "OptimizerConfig",
    "Problem",
    "RecipeSpec",
    "RewardConfig",
    "RoleName",
    "RolloutConfig",
    "RunConfig",
    "ServedTeacherConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "TrainerConfig",
    "declare",
    "describe",
    "expected",
    "leaves",
    "load_config",
    "read",
    "row_limit",
    "shipped_recipes",
    "shown",
    "to_yaml",
    "unread_sections",
    "values_of",
    "why_unread",
]
