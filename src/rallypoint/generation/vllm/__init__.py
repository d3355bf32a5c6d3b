"""vLLM as an engine: a server in an environment of its own, reached over HTTP.

Must not know: other engines, roles; it imports nothing of vLLM here.
"""

from rallypoint.generation.vllm.connection import VllmConnection as VllmConnection
from rallypoint.generation.vllm.engine import VLLMEngine as VLLMEngine
from rallypoint.generation.vllm.server import Launch as Launch, ServerProcess as ServerProcess
from rallypoint.generation.vllm.weights import Outline as Outline
