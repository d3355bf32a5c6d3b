"""One rank of sampling: a protocol for engines, the engines, and what runs them.

Must not know: what samples are for; prompts, rewards, training.
"""

from rallypoint.generation.engine_thread import EngineThread as EngineThread
from rallypoint.generation.hf import HFEngine as HFEngine
from rallypoint.generation.native import NativeEngine as NativeEngine
from rallypoint.generation.offline import (
    as_turn as as_turn,
    generate as generate,
    outputs_of as outputs_of,
    stream as stream,
)
from rallypoint.generation.protocol import (
    GenerationEngine as GenerationEngine,
    Output as Output,
    PromptLogprobs as PromptLogprobs,
    Request as Request,
    SamplingParams as SamplingParams,
)
