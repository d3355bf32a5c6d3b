"""The backend of accelerators: paged attention in Triton, captured steps of decoding.

Must not know: requests, the scheduler, or vendors.
"""
