"""What a text is worth: rewards, in numbers."""
