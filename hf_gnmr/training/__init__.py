"""One controlled training: reading gradients, deciding, switching, writing the trace."""
