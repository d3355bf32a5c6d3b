"""The backends of CPUs and of the mode `exact`: attention in bags, steps of decoding as TorchScript.

Must not know: requests, the scheduler.
"""
