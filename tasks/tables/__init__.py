"""Stored data sets as tables, and the words about their episodes, each defined once.

`sets` selects data sets, and fetches and verifies their files. `db` opens them in DuckDB, with the words of `words.sql`
and, for who asks for them, the tables of `tables.sql`: episodes, turns, calls, groups. `words` has the same words for
rows that are in memory already, in a flow or in the trainer. A test compares both on random rows.
"""
