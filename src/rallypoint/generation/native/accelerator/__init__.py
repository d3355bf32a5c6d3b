"""What is particular to decoding on accelerators."""
