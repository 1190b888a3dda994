"""The protocol of the ``tinker`` client: message bodies and HTTP endpoints."""
