"""The trainer as many processes, its ranks.

`launcher` starts the ranks from the flow's process and sends them orders, which are names of versions. `rank` is the
program of each of them: it joins the group (`group`), compares itself with the others (`agreement`), and obeys.
"""
