"""What is particular to running on CPUs. It knows no models, roles or configs."""
