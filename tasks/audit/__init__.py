"""The audit: measures trajectory data sets and flags what is suspicious about them.

`tasks.tables` finds the data sets, fetches and verifies their files, and opens them as tables; `database` adds the
queries of `views.sql`. `run` runs each check of `checks` on them and computes the numbers. It commits the
`AuditResult` (`results`) with the cases and the page that `report` renders.
`importing` makes data sets of other programs' dumps. `reader` is a web app for the same data sets and cases. The
command line (`python -m tasks.audit`) serves it, and imports.
"""
