"""Packed networks."""
