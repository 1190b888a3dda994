"""Training of draft heads: a frozen model, and a small network that learns to draft its answers.

``training.py`` has what all kinds share: which token a head learns, the loss over all heads, and the checkpoint.
``medusa.py`` and ``eagle3.py`` have one kind each.
"""
