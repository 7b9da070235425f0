"""Downstream evaluation of runs, and the table that compares them."""
