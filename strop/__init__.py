"""strop post-trains transformer language models."""

__version__ = "0.1.0"
