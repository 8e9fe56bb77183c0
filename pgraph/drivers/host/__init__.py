"""CUDA graphs' rules on a CPU."""
