"""Drop-in `nn.Module`s whose parameter names are those of the Hugging Face modules they replace."""
