"""What is done to a model: loading, adapters, attention over packed streams, log-probabilities."""
