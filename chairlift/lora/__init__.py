"""Low-rank adapters (LoRA; Hu et al., 2021): reading them, keeping them in memory, and adding their terms to the linear
layers of a served model."""
