"""One rank of sampling: a protocol for engines, the engines, and what runs them.

Must not know: what samples are for; prompts, rewards, training.
"""

from rallypoint.generation.engine_thread import EngineThread
from rallypoint.generation.hf import HFEngine
from rallypoint.generation.native import NativeEngine
from rallypoint.generation.offline import as_turn, generate, outputs_of, stream
from rallypoint.generation.protocol import (
    FinishReason,
    GenerationEngine,
    Output,
    PromptLogprobs,
    Request,
    SamplingParams,
)
from rallypoint.generation.sampler import SampledTokens, SamplingMetadata, penalise, rollout_keys, sample, uniform

__all__ = [
    "EngineThread",
    "FinishReason",
    "GenerationEngine",
    "HFEngine",
    "NativeEngine",
    "Output",
    "PromptLogprobs",
    "Request",
    "SampledTokens",
    "SamplingMetadata",
    "SamplingParams",
    "as_turn",
    "generate",
    "outputs_of",
    "penalise",
    "rollout_keys",
    "sample",
    "stream",
    "uniform",
]
