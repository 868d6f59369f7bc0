"""Models of workers and servers: the protocol that the runtime runs, tried in every order of events."""
