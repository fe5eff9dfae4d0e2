"""Chooses learning rate, batch and length of a run, and predicts its loss: `slipstream tune`."""
