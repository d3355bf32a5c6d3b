"""What is particular to decoding on CPUs."""
