"""Networks shared by serving and training, one file per Hugging Face ``model_type``."""
