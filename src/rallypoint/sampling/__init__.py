"""Prompts in, scored groups out: which prompts are sampled when, the episodes of a group, and their staleness.

Must not know: recipes, displays, HTTP, what is done with a batch.
"""
