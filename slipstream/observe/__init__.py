"""Reports about a run: metrics, utilisation, traces, the summary."""
