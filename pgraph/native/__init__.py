"""Loops that Python is too slow for, in C: optional, built on first use (`libraries`)."""
