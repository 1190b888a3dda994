"""Decides which training work runs next: packs of many clients' sequences, and the steps between them.

Standard library only: no tensors, no clock, no threads, no input or output. Times are arguments.
"""
