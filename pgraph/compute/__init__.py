"""Recordings of new sizes, computed: from a partition's generated code, and from what captures showed."""
