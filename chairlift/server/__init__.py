"""The OpenAI-compatible HTTP server. It handles HTTP, templates and text; the engine runs in its own process."""
