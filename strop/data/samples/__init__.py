"""Data of our own that comes with the package: for a first run, for examples, for tests."""
