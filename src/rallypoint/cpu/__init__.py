"""What is particular to running on CPUs; docs/cpu.md says what each part of it gains, measured.

Must not know: models, roles, configs.

Threads, kernel caches, pages of memory, and operations in pieces that fit a cache.
"""
