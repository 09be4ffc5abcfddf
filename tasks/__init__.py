"""The stages: Prefect task shells here, plain Python by subject in the packages below."""
