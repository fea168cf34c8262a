"""What decides: values in, values out. No await, no I/O, no clock, no randomness, no logger."""
