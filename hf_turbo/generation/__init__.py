"""How tokens are chosen, one step after another."""
