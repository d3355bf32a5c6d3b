"""Our own engine: continuous batching over a paged KV cache, on the same modules that are trained.

From a request to its token, in eight files:

1. `generation/protocol.py`: what a request, its sampling parameters and its outputs are.
2. `engine.py`: `NativeEngine.step` admits, prefills, decodes and returns outputs.
3. `sequence.py`: a request while it is answered, and the prefill chunks that it is cut into.
4. `scheduler.py`: which sequences run, on which blocks; admission, preemption, batches.
5. `block_manager.py`: free and shared blocks, the prefix cache, block tables and attention metadata.
6. `model_runner.py`: prefill attention, decode batches, and the `Backend` protocol for what differs between devices.
7. `cpu/backend.py` or `accelerator/backend.py`: decode attention, and several steps in one call.
8. `generation/sampler.py`: from logits to a token and its logprobs.

Used by these: `decoder.py` (the model's arithmetic), `kv_cache.py` (the tensors), `cpu/bags.py` and
`accelerator/{kernel,graphs}.py` (the operations behind the backends).

Must not know: other engines, roles, or what the responses are for.
"""

from rallypoint.generation.native.engine import NativeEngine as NativeEngine
