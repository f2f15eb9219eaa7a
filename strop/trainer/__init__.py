"""The paths put together on `transformers.Trainer`."""
