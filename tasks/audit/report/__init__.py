"""The report of an audit.

`page` renders the HTML page from `templates`, with the plots that `plots` paints and `drawing` converts to SVG.
`markdown` makes the short report and the table rows for Prefect's artifacts and the terminal. `wording` writes numbers
and verdicts for both.
"""
