"""Trains and compares many runs from a TOML grid: optimizers x {sync, async, async with error feedback}. Each run is
one process."""
