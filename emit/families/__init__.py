"""One file a family, named after the Hugging Face `model_type`."""
