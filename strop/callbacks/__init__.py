"""What watches a run: progress, alarms, averaged weights, a record on disk."""
