"""What is done for CPUs only; docs/cpu.md has the measured gain of each part.

Must not know: models, roles, configs.

Threads, kernel caches, pages of memory, and operations in pieces that fit a cache.
"""
