"""States on servers: one owner for every element, and every order in which messages can arrive."""
