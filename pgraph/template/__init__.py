"""Recordings, the template that two of them prove, and its memory plan: plain data, no torch, no CUDA."""
