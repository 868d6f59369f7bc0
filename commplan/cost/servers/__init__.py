"""The time and bytes of traffic between workers and servers."""
