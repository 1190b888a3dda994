"""The HTTP server: sockets, limits, access, errors, streams, and the application."""
