"""The OpenAI-compatible HTTP server. It owns HTTP, templates and text; the engine runs in a process of its own."""
