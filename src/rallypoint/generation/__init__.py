"""One rank of sampling."""

from rallypoint.generation.native import NativeGenerator, SamplingParams
from rallypoint.generation.randomness import rollout_keys, uniform
from rallypoint.generation.sampling import sample

__all__ = ["NativeGenerator", "SamplingParams", "rollout_keys", "sample", "uniform"]
