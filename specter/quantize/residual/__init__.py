"""Residual directories beside INT4 directories: write, resume, read, rebuild (docs/codec.md)."""
