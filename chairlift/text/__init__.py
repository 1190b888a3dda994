"""Text and tokens: tokenizers, chat templates, grammars, tool calls."""
