"""Benchmarks: `cbviz bench`. The numbers are kept in README.md beside this file."""
