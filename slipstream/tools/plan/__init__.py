"""Predicts the time and memory of a run before it is started."""
