"""What is particular to decoding on CPUs.

Must not know: requests, the scheduler.
"""
