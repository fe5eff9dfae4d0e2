"""Starts the stages and connects them. All code that sends or receives messages is in this package."""
