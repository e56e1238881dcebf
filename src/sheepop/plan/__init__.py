"""Plans of runs before they start: budgets, machines, memory, time, layouts, and what would end a run."""
