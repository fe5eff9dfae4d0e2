"""The configuration of a run: its fields, its rules, and what follows from it."""
