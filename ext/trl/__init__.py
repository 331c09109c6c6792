"""TRL: a trainer that takes an `Algorithm`, and small models made in place."""
