"""pgraph: a `torch.compile` backend with CUDA-graph speed at no-graph memory."""

__version__ = "0.1.0"
