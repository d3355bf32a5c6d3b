"""The roles: worker and driver-side handle of each in one file.

Must not know: recipes, displays, the run's folder.
"""
