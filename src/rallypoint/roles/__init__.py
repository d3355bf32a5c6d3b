"""The roles: worker and driver-side handle of each in one file.

Must not know: recipes, prompts and groups, displays, the run's folder.
"""
