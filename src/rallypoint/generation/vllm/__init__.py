"""vLLM as an engine: a server in an environment of its own, talked to over HTTP."""

from rallypoint.generation.vllm.engine import VLLMEngine
from rallypoint.generation.vllm.server import Launch, Server, ServerProcess
from rallypoint.generation.vllm.supervisor import Connection
from rallypoint.generation.vllm.weights import Outline

__all__ = ["Connection", "Launch", "Outline", "Server", "ServerProcess", "VLLMEngine"]
