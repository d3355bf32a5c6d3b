"""rallypoint: reinforcement learning for language models, from a laptop to a cluster.

The command is `rally`; the page to read first is `rallypoint/recipes/ppo.py`. Importing this package
imports neither torch nor ray.
"""

__version__ = "0.1.0"
