"""Converts text to token ids and back, and chat messages to text. This package imports neither torch nor
transformers."""

from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift.text.tokenizer.tokenizer import ByteDecoding, Tokenizer

__all__ = ["ByteDecoding", "ChatTemplate", "Tokenizer"]
