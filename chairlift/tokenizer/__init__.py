"""Conversion of text to token ids and back, and of chat messages to text. Imports neither torch nor transformers."""

from chairlift.tokenizer.chat_template import ChatTemplate
from chairlift.tokenizer.tokenizer import ByteDecoding, Tokenizer

__all__ = ["ByteDecoding", "ChatTemplate", "Tokenizer"]
