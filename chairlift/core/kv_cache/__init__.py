"""The KV cache's bookkeeping: which request holds which block. Standard library only; a block is a number here, and the
executor has its tensor."""
