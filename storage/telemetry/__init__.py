"""A process watched while it works: `metrics` has its numbers and serves them, `spans` traces what it does.

Numbers are counted always, since that takes a microsecond; the endpoint and the export of spans are off by default.
`flows/monitoring` has the dashboard, the alerts and the page. Neither numbers nor spans hold texts of problems,
prompts or answers, or secrets: a number knows kinds and counts, a span also names of versions.
"""
