"""Attention over the paged cache: one interface, several implementations that must agree."""
