"""Render records as tables, pictures and pages."""
