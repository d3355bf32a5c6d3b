"""Our own engine: continuous batching over blocks of keys and values, on the very modules that are trained."""

from rallypoint.generation.native.engine import NativeEngine

__all__ = ["NativeEngine"]
