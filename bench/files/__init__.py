"""Files of every format are damaged; every reader must accept or refuse them."""
