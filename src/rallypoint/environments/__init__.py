"""From prompt to scored rollout.

`reward` finds the reward function and imports no torch; `scoring` applies it to a batch. They are imported
by their own names, so that a config can be checked without torch.
"""
