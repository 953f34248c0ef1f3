"""From shards and metadata to a table of wells, control roles and folds."""
