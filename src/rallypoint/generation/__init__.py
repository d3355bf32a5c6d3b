"""One rank of sampling: a protocol for engines, the engines, and what runs them.

Must not know: what samples are for; prompts, rewards, training.
"""

from rallypoint.generation.engine_thread import EngineThread
from rallypoint.generation.hf import HFEngine
from rallypoint.generation.native import NativeEngine
from rallypoint.generation.offline import as_turn, generate, outputs_of, stream
from rallypoint.generation.protocol import (
    GenerationEngine,
    Output,
    PromptLogprobs,
    Request,
    SamplingParams,
)

__all__ = [
    "EngineThread",
    "GenerationEngine",
    "HFEngine",
    "NativeEngine",
    "Output",
    "PromptLogprobs",
    "Request",
    "SamplingParams",
    "as_turn",
    "generate",
    "outputs_of",
    "stream",
]
