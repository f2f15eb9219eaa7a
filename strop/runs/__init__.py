"""A run on disk: checkpoints that appear whole, exact resume, record and report."""
