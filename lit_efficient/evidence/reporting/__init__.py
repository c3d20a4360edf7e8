"""The page of runs, and what other pages share with it."""
