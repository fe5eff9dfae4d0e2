"""Predicts what a run would take, in time and in memory, before it is started."""
