"""The config: a frozen, typed tree that is checked whole before anything starts."""

from rallypoint.config.fields import Section, leaves, section_of, shown, values_of
from rallypoint.config.load import LoadedConfig, expected, load_config
from rallypoint.config.plan import Plan, RoleMemory, make_plan
from rallypoint.config.problem import Problem
from rallypoint.config.sections import (
    Activations,
    ActorConfig,
    CheckConfig,
    ClusterConfig,
    CreateModelConfig,
    CriticConfig,
    DataConfig,
    GenerateDataConfig,
    GRPOConfig,
    KLConfig,
    LoRAConfig,
    OnTooLong,
    OptimizerConfig,
    PlacementConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from rallypoint.config.source import COMMAND_LINE, describe, read, shipped_recipes, to_yaml
from rallypoint.config.tree import RoleName, RunConfig, unread_sections, why_unread

__all__ = [
    "COMMAND_LINE",
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
    "Plan",
    "Problem",
    "RoleMemory",
    "RoleName",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TrainerConfig",
    "describe",
    "expected",
    "leaves",
    "load_config",
    "make_plan",
    "read",
    "section_of",
    "shipped_recipes",
    "shown",
    "to_yaml",
    "unread_sections",
    "values_of",
    "why_unread",
]
