"""The report of an audit.

`page` renders the HTML page from `templates`, with the SVG pictures that `plots` paints. `wording` writes numbers and
verdicts for people, the short report in Markdown and the rows of tables for Prefect's artifacts and the terminal.
"""
