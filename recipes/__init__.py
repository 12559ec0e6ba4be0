"""Plain-data recipes (models, targets, shapes) and their strict schema."""
