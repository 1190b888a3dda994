"""GGUF, the file format of llama.cpp: its header, its tensors, and how weights are stored in blocks."""
