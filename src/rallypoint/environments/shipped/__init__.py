"""The reward functions and the tools that ship: answers compared with the truth, code by its tests, Python, a search.

Must not know: batches, tensors, processes. Each reward is called as a user's function is, in a process that may be
ended, and needs the standard library only; what else one needs is imported when it is first called.
"""
