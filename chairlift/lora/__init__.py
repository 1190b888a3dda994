"""Low-rank adapters (LoRA; Hu et al., 2021): read, held in memory, and added to the products of a served model."""
