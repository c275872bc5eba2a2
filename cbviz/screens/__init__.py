"""Screens that lie over the explorer."""
