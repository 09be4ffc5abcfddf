"""The audit: measures trajectory data sets and flags what is suspicious about them.

`selection` finds the data sets, `intake` fetches and verifies their files, `database` opens them as tables of DuckDB.
`run` runs each check of `checks` on them and computes `numbers`; the outcome is an `AuditResult` (`results`), with the
cases in the database. `record` commits it as a version, with the page that `report` renders. `task` holds the Prefect
tasks. `reader` is a web app for the same data sets and cases; `commands` starts it.
"""
