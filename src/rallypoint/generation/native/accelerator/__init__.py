"""What is particular to decoding on accelerators.

Must not know: requests, the scheduler.
"""
