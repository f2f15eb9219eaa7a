"""The `strop` command."""
