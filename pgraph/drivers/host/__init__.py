"""The host driver: graphs on a CPU, by the rules of CUDA graphs."""
