"""The audit: measures trajectory data sets and flags what is suspicious about them.

`data_sets` finds the data sets, and fetches and verifies their files; `database` opens them as the tables of
`tables.sql`. `run` runs each check of `checks` on them and computes the numbers; the outcome is an `AuditResult`
(`results`), with the cases in the database. `record` commits it as a version, with the page that `report` renders.
`importing` makes data sets of other programs' dumps, `comparing` compares two.
`task` holds the Prefect tasks. `reader` is a web app for the same data sets and cases: `python -m tasks.audit read`.
"""
