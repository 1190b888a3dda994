"""GGUF, the file format of llama.cpp: header, tensors, and the weights in their blocks."""
