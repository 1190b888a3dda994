"""What the engine and the server count, as plain records, and how Prometheus reads them."""
