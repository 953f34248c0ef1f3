"""Numbers and flags of plate quality; the pages are made in `phenoica.report`."""
