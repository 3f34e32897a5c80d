"""Checks, transfers and imports that every room uses."""
