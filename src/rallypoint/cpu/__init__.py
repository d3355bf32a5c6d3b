"""What is done for CPUs only; docs/cpu.md says what each part gains, measured.

Must not know: models, roles, configs.

Threads, kernel caches, pages of memory, and operations in pieces that fit a cache.
"""
