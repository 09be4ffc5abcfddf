"""The audit's report: one HTML page, and Markdown and rows for other places."""
