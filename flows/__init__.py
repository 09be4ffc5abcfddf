"""Prefect flows: the pages to read first."""
