"""A comparison as text for a person and as JSON for a program. These functions return strings; only the CLI prints."""
