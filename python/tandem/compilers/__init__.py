"""Registrations with torch's compilers and exporters, none of which is imported for them."""
