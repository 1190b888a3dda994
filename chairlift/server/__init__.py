"""The OpenAI-compatible HTTP server. This process handles HTTP, chat templates and text; the engine runs in its own
process."""
