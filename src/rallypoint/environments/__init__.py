"""From prompt to scored rollout: episodes, and reward functions in processes of their own.

Must not know: engines, roles, where weights come from.

`reward` finds the reward function and imports no torch; `scoring` applies it to a batch. They are imported
by their own names, so that a config can be checked without torch.
"""
