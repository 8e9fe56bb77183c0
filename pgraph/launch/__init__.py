"""Today's addresses in, ordinary tensors out."""
