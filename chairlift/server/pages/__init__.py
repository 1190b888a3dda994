"""Pages for browsers: the chat, the documentation and the live view."""
