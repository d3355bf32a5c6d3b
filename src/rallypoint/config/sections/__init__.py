"""The sections of the config, a file for each subject: keys with their ranges.

Must not know: what follows from several keys; that is a property of the tree, or the plan.
"""
