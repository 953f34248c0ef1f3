"""From shards to one embedding and one row of image measures a well."""
