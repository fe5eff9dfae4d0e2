"""What a run reports: metrics, utilisation, traces, the summary."""
