"""The engine's speed beside what the machine allows and what others reach (see README.md)."""
