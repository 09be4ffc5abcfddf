"""The reader: a small web app on this machine, in which people browse trajectories.

Pages are made here and hold no script; a browser that is shown hostile text has nothing to run it with.
"""
