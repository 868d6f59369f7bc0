"""What a bound program asks of the machine that it runs on (`machine`): a mesh of devices, the ranks of a
communicator, or a server process. A third kind is one more file."""
