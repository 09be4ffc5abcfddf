"""What an answer is worth: the verdict on it and the rewards made of verdicts."""
