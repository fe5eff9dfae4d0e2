"""One process, many runs: optimizers x {sync, async, async with error feedback}, from a TOML grid."""
