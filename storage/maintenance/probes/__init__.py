"""Probes of a place, which `doctor` runs. A probe returns what it found, or raises `Wrong` or `Untried`."""
