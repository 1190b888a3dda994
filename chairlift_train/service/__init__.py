"""Training as a service: many clients fine-tune and sample together, over the protocol of the ``tinker`` client."""
