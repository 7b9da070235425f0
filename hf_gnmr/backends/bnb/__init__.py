"""Bases in bitsandbytes' 8 bits, and the original weights that a lifted unit runs."""
