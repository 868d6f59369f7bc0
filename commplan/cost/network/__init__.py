"""The network: links, where ranks lie, what each link carries, and messages one by one."""
