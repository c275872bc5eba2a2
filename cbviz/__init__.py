"""The explorer: a Textual application that draws the records of an engine."""
