"""CUDA: every driver call that pgraph makes."""
