"""vLLM as an engine: a server in an environment of its own, talked to over HTTP."""

from rallypoint.generation.vllm.connection import Connection
from rallypoint.generation.vllm.engine import VLLMEngine
from rallypoint.generation.vllm.outline import Outline
from rallypoint.generation.vllm.server import Launch, Server, ServerProcess

__all__ = ["Connection", "Launch", "Outline", "Server", "ServerProcess", "VLLMEngine"]
