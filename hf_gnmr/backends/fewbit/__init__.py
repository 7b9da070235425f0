"""Products in few bits: FP8, and simulated 4 and 6 bits."""
