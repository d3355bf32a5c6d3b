"""Our own engine: continuous batching over blocks of keys and values, on the modules that are trained.

Must not know: other engines, roles.
"""

from rallypoint.generation.native.engine import NativeEngine

__all__ = ["NativeEngine"]
