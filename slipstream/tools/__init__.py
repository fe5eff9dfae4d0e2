"""Tools around the engine: plan, study, bench and report."""
