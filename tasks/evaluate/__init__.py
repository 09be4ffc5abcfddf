"""What a policy can do: accuracies with intervals, comparisons, and the run's report."""
