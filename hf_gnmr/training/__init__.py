"""One training under control: reading gradients, deciding, switching, writing the trace."""
