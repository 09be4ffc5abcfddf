"""From problems to trajectories: which episodes an iteration plays, and the collector that plays them."""
