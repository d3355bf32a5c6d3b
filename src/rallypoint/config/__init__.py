"""The config: a frozen, typed tree that is checked whole before anything starts."""

from rallypoint.config.fields import Problem, Section, leaves, section_of, shown, values_of
from rallypoint.config.load import LoadedConfig, expected, load_config
from rallypoint.config.recipes import RECIPES, RecipeSpec, RoleName, declare
from rallypoint.config.sections.frame import CheckConfig, TrainerConfig
from rallypoint.config.sections.learning import (
    Activations,
    ActorConfig,
    CriticConfig,
    GRPOConfig,
    KLConfig,
    OptimizerConfig,
    PPOConfig,
)
from rallypoint.config.sections.material import (
    CreateModelConfig,
    DataConfig,
    GenerateDataConfig,
    LoRAConfig,
    OnTooLong,
    RewardConfig,
)
from rallypoint.config.sections.places import ClusterConfig, PlacementConfig
from rallypoint.config.sections.sampling import RolloutConfig
from rallypoint.config.source import COMMAND_LINE, describe, read, shipped_recipes, to_yaml
from rallypoint.config.tree import RunConfig, unread_sections, why_unread

__all__ = [
    "COMMAND_LINE",
    "RECIPES",
    "Activations",
    "ActorConfig",
    "CheckConfig",
    "ClusterConfig",
    "CreateModelConfig",
    "CriticConfig",
    "DataConfig",
    "GRPOConfig",
    "GenerateDataConfig",
    "KLConfig",
    "LoRAConfig",
    "LoadedConfig",
    "OnTooLong",
    "OptimizerConfig",
    "PPOConfig",
    "PlacementConfig",
    "Problem",
    "RecipeSpec",
    "RewardConfig",
    "RoleName",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TrainerConfig",
    "declare",
    "describe",
    "expected",
    "leaves",
    "load_config",
    "read",
    "section_of",
    "shipped_recipes",
    "shown",
    "to_yaml",
    "unread_sections",
    "values_of",
    "why_unread",
]
