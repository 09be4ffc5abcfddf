"""`make pictures`: the pictures in README.md and in the pages beside the code.

They show real results: a run of the demo, the nights of `make retrain-demo`, an audit, and Prefect's pages. What is
missing under `--root` is made first (about 20 minutes), but not the run of `make demo-llm`, whose curve is copied if it
is there; the drawings of the stages are made from nothing.
"""
