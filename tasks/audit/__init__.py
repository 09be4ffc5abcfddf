"""The audit: measures trajectory data sets and flags what is suspicious about them.

`data_sets` finds the data sets, and fetches and verifies their files; `database` opens them as the tables of
`tables.sql`. `run` runs each check of `checks` on them and computes the numbers; the outcome is an `AuditResult`
(`results`), with the cases in the database. `record` commits it as a version, with the page that `report` renders.
`importing` makes data sets of other programs' dumps. `reader` is a web app for the same data sets and cases. The
command line (`python -m tasks.audit`) serves it, imports, and compares two data sets.
"""
