"""The live page of a run: where it is, its curves, newest transcripts, alarms, time, tokens and cost.

`page` is a web app in the reader's look; its `State` reads all of it from the store alone, and writes nothing.
"""
