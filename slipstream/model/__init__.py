"""The decoder that `slipstream train` trains, with its presets."""
