"""Who was trained on what, and what is kept out of training."""
