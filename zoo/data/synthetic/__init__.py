"""Made-up data that asks for recall, or has a known entropy."""
