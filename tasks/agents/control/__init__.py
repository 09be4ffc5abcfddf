"""Control tokens: what a chat template itself writes around messages (`written.py`), how contents never become such
tokens (`tokens.py`), and at which tokens turns end (`ends.py`).
"""
