"""The roles: worker and driver-side handle of each in one file."""
