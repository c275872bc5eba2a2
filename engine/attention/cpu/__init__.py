"""The CPU kernel: its source, how it is built, and how it is called."""
