"""Implements `slipstream train`: builds, checks, runs, saves, resumes and reshapes a run."""
