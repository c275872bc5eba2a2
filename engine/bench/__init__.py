"""Measurements of the engine: against the hardware's floor and against its peers."""
