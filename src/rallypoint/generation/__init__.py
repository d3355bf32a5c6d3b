"""One rank of sampling: a protocol for engines, the engines, and what runs them. Must not know what samples are for."""

from rallypoint.generation.engine_thread import EngineThread
from rallypoint.generation.hf import HFEngine
from rallypoint.generation.native import NativeEngine
from rallypoint.generation.offline import generate, stream
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
