"""Training of Medusa heads on a frozen model."""
