"""The models that `slipstream train` trains, and the presets of its decoder."""
