"""Read model configurations, list the ops of a decode step, and make their arguments."""
