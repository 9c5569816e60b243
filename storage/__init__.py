"""Keep bytes, tables, manifests and logs; know no step and no config."""
