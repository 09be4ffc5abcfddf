"""Scheduled retraining, below the flows: what a night trains on, the gate, and what people are told."""
