"""The controller and every other way to choose units: numpy and plain values only, no torch, no files."""
