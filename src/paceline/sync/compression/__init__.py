"""Fewer bytes on slow links: quantized and sparse encodings of flat tensors, and how they are exchanged."""
