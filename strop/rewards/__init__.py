"""From rollouts to scores."""
