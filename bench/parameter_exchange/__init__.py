"""Parameter exchange on emulated hosts: the command and a rank."""
