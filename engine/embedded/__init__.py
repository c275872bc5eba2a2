"""The model that ships with the engine, and the script that trained it."""
