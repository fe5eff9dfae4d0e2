"""Writes one run, or several runs for comparison, as one HTML page that needs only a browser."""
