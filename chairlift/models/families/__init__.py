"""Families of models, one module per ``model_type`` or group of them."""
