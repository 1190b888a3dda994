"""The computing half of the training service: adapters that train together on one frozen model."""
