"""The config: a frozen, typed tree that is checked whole before anything starts."""

from rallypoint.config.check import Problem
from rallypoint.config.fields import Section, leaves, section_of, unit_of
from rallypoint.config.load import LoadedConfig, load_config, range_of, values_of
from rallypoint.config.plan import Plan, RoleMemory, make_plan
from rallypoint.config.source import describe, shipped_recipes
from rallypoint.config.tree import (
    UNUSED_SECTIONS,
    ActorConfig,
    ClusterConfig,
    CreateModelConfig,
    CriticConfig,
    DataConfig,
    GenerateDataConfig,
    GRPOConfig,
    KLConfig,
    OptimizerConfig,
    PlacementConfig,
    PPOConfig,
    RoleName,
    RolloutConfig,
    RunConfig,
)

__all__ = [
    "UNUSED_SECTIONS",
    "ActorConfig",
    "ClusterConfig",
    "CreateModelConfig",
    "CriticConfig",
    "DataConfig",
    "GRPOConfig",
    "GenerateDataConfig",
    "KLConfig",
    "LoadedConfig",
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
    "describe",
    "leaves",
    "load_config",
    "make_plan",
    "range_of",
    "section_of",
    "shipped_recipes",
    "unit_of",
    "values_of",
]
