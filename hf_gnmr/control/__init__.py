"""The controller and all other triggers: numpy and plain values only, no torch, no files."""
