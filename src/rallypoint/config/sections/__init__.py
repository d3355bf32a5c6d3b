"""The sections of the config, one file for each subject."""

from rallypoint.config.sections.frame import CheckConfig, CheckpointConfig, TrainerConfig
from rallypoint.config.sections.learning import (
    Activations,
    ActorConfig,
    CriticConfig,
    CriticOptimizerConfig,
    EngineConfig,
    GRPOConfig,
    KLConfig,
    OptimizerConfig,
    PPOConfig,
    ReferenceConfig,
)
from rallypoint.config.sections.material import (
    CreateModelConfig,
    DataConfig,
    GenerateDataConfig,
    LoRAConfig,
    ModelConfig,
    OnTooLong,
    RewardConfig,
)
from rallypoint.config.sections.places import ClusterConfig, MeshConfig, PlacementConfig
from rallypoint.config.sections.sampling import RolloutConfig, ValidationConfig

__all__ = [
    "Activations",
    "ActorConfig",
    "CheckConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CreateModelConfig",
    "CriticConfig",
    "CriticOptimizerConfig",
    "DataConfig",
    "EngineConfig",
    "GRPOConfig",
    "GenerateDataConfig",
    "KLConfig",
    "LoRAConfig",
    "MeshConfig",
    "ModelConfig",
    "OnTooLong",
    "OptimizerConfig",
    "PPOConfig",
    "PlacementConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "ValidationConfig",
]
