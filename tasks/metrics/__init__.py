"""The numbers of a run: one row for each committed stage of an iteration, and for each evaluation.

`rows` makes a row from a manifest, with the field's names; `log` keeps the rows of a run in `runs/<run>/metrics/`;
`show` has what people see: the console's line about an iteration, tables, plots, and an alarm.
"""
