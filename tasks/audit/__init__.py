"""The audit: what is in trajectory data sets, and what is suspicious about it."""
