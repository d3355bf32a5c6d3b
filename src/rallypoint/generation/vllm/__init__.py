"""vLLM as an engine: a server in an environment of its own, reached over HTTP.

Must not know: other engines, roles; it imports nothing of vLLM here.
"""

from rallypoint.generation.vllm.connection import VllmConnection
from rallypoint.generation.vllm.engine import VLLMEngine
from rallypoint.generation.vllm.server import Launch, ServerProcess
from rallypoint.generation.vllm.weights import Outline

__all__ = ["Launch", "Outline", "ServerProcess", "VLLMEngine", "VllmConnection"]
