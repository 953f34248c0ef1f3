"""Pages that a person reads."""
