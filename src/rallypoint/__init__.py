"""rallypoint: reinforcement learning for language models, from a laptop to a cluster.

Must not know: torch or Ray when it is imported; the page to read first is `rallypoint/recipes/ppo.py`.

The command is `rally`.
"""

__version__ = "0.1.0"
