"""From prompts to rollouts: how a policy writes, and what is kept of it."""
