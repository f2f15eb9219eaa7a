"""Pure functions of tensors: every loss and reduction. Imports torch only."""
