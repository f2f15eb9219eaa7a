"""What a model is worth on rows it wasn't trained on, with the uncertainty of every number."""
