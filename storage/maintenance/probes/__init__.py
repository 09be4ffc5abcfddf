"""What `doctor` tries on a place, by subject. A probe returns what it found, or raises `Wrong` or `Untried`."""
