"""Built-in demo plates: rendered wells in the published layout, with their true factors."""
