"""What several techniques share; no YAML names anything here."""
