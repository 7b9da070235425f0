"""Where the recovery path's weights are kept, and how an active unit gets at them: one file a store."""
