"""One rank of sampling: a protocol for engines, two of them, and the doors through which they are used."""

from rallypoint.generation.doors import EngineThread, generate, stream
from rallypoint.generation.hf import HFEngine
from rallypoint.generation.native import NativeEngine
from rallypoint.generation.protocol import FinishReason, GenerationEngine, Output, Request, SamplingParams
from rallypoint.generation.randomness import rollout_keys, uniform
from rallypoint.generation.sampler import Draws, Rules, penalise, sample

__all__ = [
    "Draws",
    "EngineThread",
    "FinishReason",
    "GenerationEngine",
    "HFEngine",
    "NativeEngine",
    "Output",
    "Request",
    "Rules",
    "SamplingParams",
    "generate",
    "penalise",
    "rollout_keys",
    "sample",
    "stream",
    "uniform",
]
