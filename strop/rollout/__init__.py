"""From prompts to scored rollouts."""
