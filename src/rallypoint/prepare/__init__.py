"""Everything before a run's first process: what a config amounts to, and whether machine, files and data fit it.

Must not know: roles, recipes, displays. `plan`, `preflight` and `machine` import neither torch nor Ray, so that errors
come at once; `material` reads tokenizer, prompts and rewards.
"""
