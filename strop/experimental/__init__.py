"""Import paths that users know; the code is in `strop.trainer`."""
