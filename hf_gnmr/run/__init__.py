"""A recipe, and what it takes to run it: data, models, the output folder, the plan."""
