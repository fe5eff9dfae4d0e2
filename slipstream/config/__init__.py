"""The configuration of a run: its fields, the rules for their values, and what is derived from them."""
