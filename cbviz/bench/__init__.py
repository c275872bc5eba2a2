"""Measurements of the explorer, on the machine at hand."""
