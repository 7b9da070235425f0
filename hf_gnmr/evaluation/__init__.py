"""Downstream evaluation of runs, and the table of several."""
