"""`make pictures`: the pictures in README.md and in the pages beside the code.

They show real results: a run of the demo, the nights of `make retrain-demo`, an audit, and Prefect's pages. What is
missing under `--root` is made first (about 20 minutes); the drawings of the stages are made from nothing.
"""
