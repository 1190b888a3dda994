"""The parts every decoder-only transformer is made of."""
